"""What holds the code together: layers, public names, generated files, sizes."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
ROOTS = [ROOT / name for name in ("proto", "preprocessor", "reorder_service", "trainer", "cli")]
"""Each holds a portion of the namespace package `headrace`."""
CONTRACTS = ROOT / "proto" / "headrace"
GENERATED = CONTRACTS / "v1"
PLANNER = ROOT / "reorder_service" / "headrace" / "reorder_service"
SOURCES = [path for folder in ROOTS for path in sorted(folder.rglob("*.py")) if GENERATED not in path.parents]
MAX_LINES = 400
PAPERS = ("cornstarch", "disttrain", "entrain", "oobleck", "optimus", "orchmllm", "stepccl")

PUBLIC = {
    "headrace.trainer": {"LocalJob", "Microbatch", "Parallel", "Step", "StepLoader", "connect", "local", "replan"},
    "headrace.ray": {"RayRun", "submit"},
    "headrace.reorder_service.planning": {"STRATEGIES", "plan", "sample_costs", "warm_up"},
    "headrace.preprocessor.sources": {"Record", "Shard", "list_shards", "open_shard"},
}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """What a file imports, at its head or in a function: modules, and with `from package import name` also `package.name`."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def imported(path: Path) -> set[str]:
    """Top-level names of what a file imports."""
    return {name.partition(".")[0] for name in imported_modules(path)}


@pytest.mark.slow
def test_the_layers_hold() -> None:
    """The contracts of pyproject.toml: cli over the services over headrace, planning pure, no tensor in the reorder service.
    `make test` has them from `make layers`.
    """
    # In a process of its own: in ours it would switch off the loggers that other tests read.
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_the_public_names_are_these(module: str) -> None:
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == PUBLIC[module]
    assert all(hasattr(loaded, name) for name in PUBLIC[module])


def test_every_file_fits_on_a_few_screens() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_every_file_says_what_it_is_for_and_what_it_does_not_know() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if not ast.get_docstring(tree(path))] == []


def module_name(path: Path) -> str:
    """`headrace.trainer.train` for the file of that name below a root."""
    root = next(root for root in ROOTS if root in path.parents)
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def test_file_names_are_unique() -> None:
    """One name for one thing, but for doors: a command's file is named after the command, one of `api` after its .proto file, and
    each may be called like the one file behind it. Both services have a `server`.
    """
    files = [path for path in SOURCES if path.name not in {"__init__.py", "base.py", "server.py"}]
    doors = [path for path in files if ROOT / "cli" in path.parents or path.parent == PLANNER / "api"]
    others = [path for path in files if path not in doors]
    for group in (doors, others):
        names = Counter(path.name for path in group)
        assert [str(path.relative_to(ROOT)) for path in group if names[path.name] > 1] == []
    commands = {f"{module.rpartition('.')[2]}.py" for module, _ in COMMANDS.values()} | {"quarantine.py"}
    shared = {path.name for path in doors} & {path.name for path in others}
    assert shared <= commands | {f"{proto.stem}.py" for proto in GENERATED.glob("*.proto")}


def test_what_is_no_command_needs_no_command_line() -> None:
    """Cost tables, gains, timelines, findings and dissections are a library: nothing that they import reads arguments."""
    libraries = {
        "costs": ("cost_table", "dataset_costs", "survey"),
        "planning": (
            "gain",
            "gain_picture",
            "outcome",
            "pipeline_panel",
            "problem",
            "strategy_pictures",
            "timeline",
            "trace_events",
        ),
        "watch": ("status_lines", "top_figures", "top_table"),
        "inspect": ("contact_sheet", "dissection", "histogram", "preview"),
        "failures": ("availability_file", "failures_picture"),
        "experiment": tuple(f"{paper}_experiments" for paper in PAPERS),
    }
    by_name = {module_name(path): path for path in SOURCES}
    seen: set[str] = set()
    waiting = [f"headrace.cli.{room}.{name}" for room, names in libraries.items() for name in names]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        modules = imported_modules(by_name[name])
        assert "argparse" not in modules, name
        waiting += [module for module in modules if module in by_name and module not in seen]


def test_planning_sees_arrays_and_dataclasses_only() -> None:
    allowed = {"__future__", "collections", "dataclasses", "enum", "functools", "math", "typing", "os", "numpy", "numba"}
    allowed |= {"heapq", "itertools", "operator", "headrace"}
    solver = {name: {"scipy"} for name in ("node_permutation.py", "reconfiguration.py", "exact_distribution.py")}
    pure = [
        *sorted((PLANNER / "planning").rglob("*.py")),
        *sorted((PLANNER / "recovery").rglob("*.py")),
        CONTRACTS / "schedule.py",
        CONTRACTS / "backward_factors.py",
    ]
    others = {path.name: imported(path) - allowed for path in pure}
    assert {name: modules for name, modules in others.items() if modules} == solver


def test_jobs_of_the_cluster_that_tests_share_have_names_of_their_own() -> None:
    """`calm` keeps the jobs of every test that a worker happens to run: a name that two of them give is refused to the second."""
    named: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests" / "integration").glob("test_*.py")):
        for test in (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)):
            if any(argument.arg == "calm" for argument in test.args.args):
                for name in jobs_named_in(test):
                    named.setdefault(name, set()).add(f"{path.name}::{test.name}")
    assert {name: tests for name, tests in named.items() if len(tests) > 1} == {}
    assert len(named) > 20, "names are found where they are given"


def jobs_named_in(test: ast.FunctionDef) -> set[str]:
    """Names in `spec("NAME", ...)`."""
    named = set()
    for node in ast.walk(test):
        match node:
            case ast.Call(func=ast.Name(id="spec"), args=[ast.Constant(value=str(name)), *_]):
                named.add(name)
    return named


def test_no_pickle_anywhere() -> None:
    """Design section 3, invariant 5: Arrow and protobuf only."""
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    assert [str(path) for path in SOURCES if imported(path) & forbidden] == []


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    """`make stubs` changes nothing. The version line of the generator is left out: it changes with every release."""
    protos = sorted(GENERATED.glob("*.proto"))
    arguments = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    names = [str(path.relative_to(ROOT / "proto")) for path in protos]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *arguments, *names], cwd=ROOT / "proto", check=True)
    fresh = {path.name: path for path in (tmp_path / "headrace" / "v1").iterdir()}
    assert set(fresh) == {path.name for path in GENERATED.glob("*_pb2*")}
    stale = [name for name, path in fresh.items() if lines(path) != lines(GENERATED / name)]
    assert stale == [], "run `make stubs`"


def lines(path: Path) -> list[str]:
    volatile = ("# Protobuf Python Version", "GRPC_GENERATED_VERSION = ", "_runtime_version", "    ")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(volatile)]


def test_light_modules_import_nothing_heavy() -> None:
    """`headrace --help` is quick, and a machine needs only the extras of what it runs."""
    code = """
import importlib, sys
for name in ("main", "demo.demo", "run.train", "run.reorder", "run.preprocessor"):
    importlib.import_module(f"headrace.cli.{name}")
    if heavy := {"torch", "numba", "matplotlib", "torchaudio", "PIL", "redis"} & set(sys.modules):
        sys.exit(f"{name} imports {heavy}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_reorder_service_starts_without_the_other_extras() -> None:
    others = "{'torch', 'PIL', 'soundfile', 'tokenizers'}"
    code = f"import sys, headrace.reorder_service.server; sys.exit(', '.join({others} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
