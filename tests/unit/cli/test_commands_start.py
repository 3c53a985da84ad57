"""How the command starts: interrupts, the demo's data, and processes that cannot start."""

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.admission import PROTOCOL
from headrace.cli import example
from headrace.cli.demo import demo
from headrace.cli.main import main
from headrace.errors import HeadraceError
from headrace.processes import MAX_EARLY_EXITS, Process, ProcessGroup


@pytest.fixture
def serving_endpoint() -> Iterator[str]:
    """Of a server that reports its health."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_ctrl_c_while_arguments_are_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "add_arguments", lambda _: signal.raise_signal(signal.SIGINT))
    assert main(["demo"]) == 130


def test_sigterm_counts_as_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), ProcessGroup():
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("inherited", "words"), [("SIG_IGN", "went on\n"), ("SIG_DFL", "")])
def test_a_service_hears_ctrl_c_unless_its_shell_has_it_ignored(inherited: str, words: str) -> None:
    script = f"""
import asyncio, signal
from headrace.cli.run.serve import run_service

async def service():
    signal.raise_signal(signal.SIGINT)
    for _ in range(9):
        await asyncio.sleep(0)
    print("went on")

signal.signal(signal.SIGINT, signal.{inherited})
run_service("reorder", service(), "text")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, words), done.stderr


PRINTING = """
import sys
from headrace.cli import main
from headrace.cli.run import health
health.run = lambda args: print("{}") or 0
sys.exit(main.main(["health", "127.0.0.1:1"]))
"""


@pytest.mark.parametrize(
    ("redirect", "code", "words"),
    [
        (
            ">/dev/full",
            1,
            "headrace: cannot write to standard output: No space left on device: make room, or write elsewhere\n",
        ),
        (">&-", 0, ""),
        ("| true", 141, ""),
    ],
)
def test_output_that_cannot_be_written_ends_quietly_or_with_one_sentence(redirect: str, code: int, words: str) -> None:
    script = f"{shlex.join([sys.executable, '-c', PRINTING])} {redirect}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, words)


LOADED = """
import sys
from headrace.cli.main import main
code = main(["health", sys.argv[1]])
print(*{"numpy", "pydantic", "yaml", "rich", "redis", "headrace.cli.watch.top", "headrace.spec"} & {*sys.modules})
sys.exit(code)
"""


def test_a_health_check_loads_little_since_it_comes_every_few_seconds(serving_endpoint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, serving_endpoint], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "serving\n\n"), done.stderr


def test_of_several_endpoints_one_that_serves_is_enough(serving_endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", f"127.0.0.1:1,{serving_endpoint}"]) == 0
    assert capsys.readouterr().out == f"127.0.0.1:1: not serving\n{serving_endpoint}: serving\n"
    assert main(["health", "--endpoint", "127.0.0.1:1"]) == 1


def test_the_release_and_its_protocol_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"headrace {metadata.version('headrace')}, protocol {PROTOCOL}\n")


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "x", "--seed", "y"], ["no-command"]])
def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("headrace")


def test_the_bundled_data_has_one_name_wherever_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "cli" / "example_data"
    installed.mkdir(parents=True)
    monkeypatch.setattr(example, "__file__", str(tmp_path / "cli" / "example.py"))
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    [source] = demo._spec(parser.parse_args([])).sources
    assert (source.path, source.name) == (str(installed), "data")
    [source] = demo._spec(parser.parse_args(["/some/where"])).sources
    assert source.name == "where"


def test_a_process_that_cannot_start_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    process = Process("preprocessor 0", ["preprocessor", "--reorder", "nonsense"], tmp_path / "log")
    for _ in range(MAX_EARLY_EXITS):
        process.wait(30)
        process.restart()
    process.wait(30)
    with pytest.raises(HeadraceError, match=r"preprocessor 0 ended 4 times .* 'nonsense' is not HOST:PORT"):
        process.restart()
