"""What is published is whole, and runs by itself; what is installed takes one name, `headrace`, whose place nothing in a user's
folder can take."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from release.building import Archives, build, build_twice
from release.contents import check_contents
from release.tree import checked_out, export
from release.trial import try_out

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SOME_TIME_S = 1_700_000_000


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """The source archive, and the wheel that is built of it."""
    return build(ROOT, tmp_path_factory.mktemp("archives"), SOME_TIME_S)


@pytest.fixture(scope="module")
def wheel(archives: Archives) -> Path:
    return archives.wheel


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A training repository whose own modules are called as Headrace's rooms are."""
    folder = tmp_path / "repository"
    for name in ("trainer/__init__.py", "reorder_service/__init__.py", "cli.py", "preprocessor.py", "proto.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise SystemExit('the module of the repository was imported')")
    return folder


def test_the_archives_have_every_file_of_the_package_and_no_other(archives: Archives) -> None:
    check_contents(archives, ROOT, VERSION)


def test_a_wheel_has_one_top_level_name_and_all_that_its_commands_need(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"headrace", f"headrace-{VERSION}.dist-info"}
    assert "headrace/__init__.py" not in names, "it would hide the other portions of an editable install"
    assert {
        "headrace/py.typed",
        "headrace/trainer/loading/connecting.py",
        "headrace/preprocessor/text/tokenizer.json",
        "headrace/reorder_service/page/static/index.html",
        "headrace/cli/example_data/ATTRIBUTION.csv",
        "headrace/cli/deploy/slurm/headrace.sbatch",
        "headrace/cli/deploy/kubernetes/overlays/jobset/jobset.yaml",
    } <= set(names)


@pytest.mark.parametrize("package", ["trainer", "cli", "preprocessor", "ray", "reorder_service"])
def test_a_portion_that_is_imported_from_a_clone_has_types_for_those_who_use_it(package: str) -> None:
    """In a wheel that of `headrace` is enough; in an editable install each portion has a folder of its own."""
    (portion,) = ROOT.glob(f"*/headrace/{package}/__init__.py")
    assert portion.with_name("py.typed").exists()


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=False).stdout:
        pytest.skip("there are changes: what is built is a commit")
    commit = checked_out(ROOT)
    build_twice(lambda folder: export(ROOT, commit, folder), tmp_path, commit.epoch_s)


USER = """
from headrace import trainer
from headrace.jobs_client import JobsClient

reveal_type(trainer.connect)
reveal_type(JobsClient.submit)
trainer.connect(7070)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_uses_a_wheel_is_told_of_wrong_types(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (tmp_path / "user.py").write_text(USER)
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--config-file=", "--python-executable", str(python), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "missing library stubs" not in done.stdout.replace('"torch', "")
    assert 'Revealed type is "def (endpoint: ' in done.stdout, done.stdout
    assert "headrace.spec.JobSpec" in done.stdout
    assert 'Argument 1 to "connect" has incompatible type "int"' in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [str(BIN / "headrace"), "train", "--help"],
        [sys.executable, "-m", "headrace.cli", "train", "--help"],
        [sys.executable, "-c", "import headrace.trainer, headrace.preprocessor.engine, headrace.reorder_service.server"],
        [str(BIN / "torchrun"), "--nproc-per-node", "1", "--no-python", str(BIN / "headrace"), "train", "--help"],
    ],
    ids=["headrace", "python -m", "import", "torchrun"],
)
def test_a_repository_may_have_a_trainer_of_its_own(command: list[str], crowded: Path) -> None:
    done = subprocess.run(command, cwd=crowded, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wheel_in_an_empty_environment_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    """Downloads torch and whatever else it names: `pip install headrace && headrace demo`, in an empty folder."""
    assert try_out(wheel, VERSION, tmp_path).startswith(f"headrace {VERSION}, protocol ")
