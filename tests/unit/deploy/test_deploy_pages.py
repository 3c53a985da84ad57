"""The pages about deploying, and the scripts of Slurm and SkyPilot, name commands and files that are there."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headrace.cli.main import _parse
from tests.kubernetes_documents import ROOT, pod_specs
from tests.kustomization import kustomized

PAGES = [ROOT / "docs" / name for name in ("kubernetes.md", "slurm.md", "skypilot.md")]
PARSED = [*PAGES, *(ROOT / "docs" / name for name in ("compose.md", "page.md", "ray.md", "scaling.md", "security.md"))]
SCRIPT = ROOT / "deploy" / "slurm" / "headrace.sbatch"
GROUP = ROOT / "deploy" / "skypilot" / "headrace.yaml"
_END = re.compile(r"\s*(?:[|&;)>]|2>|<|$)")


def _blocks(page: Path) -> str:
    text = page.read_text()
    fenced = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*re.findall(r"^    (.*)$", text, re.MULTILINE), *fenced])


def _texts() -> Iterator[tuple[str, str]]:
    for page in PARSED:
        yield page.name, _blocks(page)
    yield SCRIPT.name, SCRIPT.read_text()
    for task in list(yaml.safe_load_all(GROUP.read_text()))[1:]:
        yield f"skypilot-{task['name']}", task["run"]


TEXTS = dict(_texts())


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every headrace command in a shell's text, its variables filled in."""
    text = re.sub(r"^\s*#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    text = re.sub(r'"?\$\{\w+:\?[^}]*\}"?|"\$\{\w+\[@\]\}"', "filled", text)
    for found in re.finditer(r"(?<![\w./~-])(?<!namespace )(?<!user )(?<!SETUSER )headrace (\w[^\n]*)", text):
        words = []
        for word in found[1].split():
            if _END.match(word):
                break
            words.append(word.removesuffix(")").removesuffix(";"))
            if word.endswith((")", ";")):
                break
        yield [re.sub(r"\$\{?\w+\}?", "filled", word) for word in shlex.split(" ".join(words), comments=True)]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_headrace_takes_every_command(text: str) -> None:
    commands = [command for command in _commands(text) if command[0] != "reorder" or len(command) > 1]
    assert commands
    for command in commands:
        _parse(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_of_the_blocks_and_links_are_there(page: Path) -> None:
    named = re.findall(r"\b((?:deploy|docker|examples|tests)/[\w./-]*[\w])", _blocks(page))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_secrets_of_the_kubernetes_page_are_those_of_the_pods() -> None:
    blocks = _blocks(PAGES[0])
    made = set(re.findall(r"create secret generic (headrace-[\w-]+)", blocks.replace("headrace-tls-$kind", "headrace-tls-")))
    for kind in re.findall(r"for kind in ([\w ]+);", blocks)[0].split():
        made.add(f"headrace-tls-{kind}")
    overlays = ROOT / "deploy" / "kubernetes" / "overlays"
    documents = kustomized(overlays / "kind") + kustomized(overlays / "jobset")
    mounted = {
        volume["secret"]["secretName"]
        for document in documents
        for pod in pod_specs(document)
        for volume in pod["volumes"]
        if "secret" in volume
    }
    assert made - {"headrace-tls-"} == mounted


def test_the_query_of_the_page_is_that_of_the_autoscalers() -> None:
    (scaled,) = [one for one in kustomized(ROOT / "deploy/kubernetes/overlays/keda") if one["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert query in " ".join(_blocks(PAGES[0]).split())


def test_the_slurm_script_is_one_of_bash_with_three_parts() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=60)
    settings = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert settings.count("#SBATCH hetjob") == 2
    for variable in re.findall(r"^\| `(HEADRACE_\w+)`", PAGES[1].read_text(), re.MULTILINE):
        assert f"${{{variable}:" in SCRIPT.read_text()


@pytest.mark.parametrize("task", list(yaml.safe_load_all(GROUP.read_text()))[1:], ids=lambda task: task["name"])
def test_each_part_of_the_job_group_has_the_python_of_the_project_whatever_the_machine_has(task: dict[str, str]) -> None:
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert re.findall(r"^uv venv .*--python (\S+) (\S+)", task["setup"], re.MULTILINE) == [(least, "~/headrace")]
    programs = re.findall(r"(\S*\b(?:python[\d.]*|pip)) (?!3\.)", task["setup"])
    assert set(programs) <= {"~/headrace/bin/python", "~/headrace/bin/pip"}
    assert "export PATH=~/headrace/bin:$PATH" in task["run"]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True, timeout=60)


def test_each_part_of_the_job_group_has_its_own_papers_and_tokens() -> None:
    header, *tasks = yaml.safe_load_all(GROUP.read_text())
    assert header["execution"] == "parallel"
    secrets = {
        task["name"]: {source.removeprefix("~/.headrace/") for source in task["file_mounts"].values() if isinstance(source, str)}
        for task in tasks
    }
    assert secrets == {
        "reorder": {"papers/reorder", "papers/client", "tokens"},
        "preprocessors": {"papers/preprocessor", "tokens/preprocess", "tokens/train"},
        "trainers": {"papers/trainer", "tokens/train"},
    }
    assert set(header["primary_tasks"]) <= set(secrets)
