"""What is installed takes one name, `headrace`, and nothing in a user's folder can take that name's place."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A training repository whose own modules are called as Headrace's rooms are."""
    folder = tmp_path / "repository"
    for name in ("trainer/__init__.py", "reorder_service/__init__.py", "cli.py", "preprocessor.py", "proto.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise SystemExit('the module of the repository was imported')")
    return folder


def test_a_wheel_has_one_top_level_name_and_all_that_its_commands_need(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"headrace", "headrace-0.1.0.dist-info"}
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
    assert not [name for name in names if "tests" in name or "benchmarks" in name]


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
@pytest.mark.timeout(1200)
def test_a_wheel_in_an_empty_environment_runs_the_demo(wheel: Path, crowded: Path, tmp_path: Path) -> None:
    """Downloads torch and whatever else the extras name."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    bin_ = tmp_path / "venv" / "bin"
    subprocess.run([str(bin_ / "pip"), "install", "--quiet", f"{wheel}[preprocessor,trainer]"], check=True)
    done = subprocess.run([str(bin_ / "headrace"), "demo"], cwd=crowded, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "18 of 18" in done.stdout
