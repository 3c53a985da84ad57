"""The processes of a node are started by one command, know which one they are, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.run.node_processes import own_process, processes_in
from headrace.cli.run.processors import shares, usable_processors
from headrace.errors import UserError

NODE = """
import subprocess, sys
from headrace.cli.run import node_processes

def start_process(arguments, environment):
    return subprocess.Popen([sys.executable, "-c", *arguments], env={**node_processes.os.environ, **environment})

if len(sys.argv) > 2:
    node_processes.LOSS_S = float(sys.argv[2])
node_processes.start_process = start_process
sys.exit(node_processes.run_node([sys.argv[1]], "n0", 2))
"""
TELL = """
import os, signal, sys, time
number = os.environ["LOCAL_RANK"]

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # a line at once, as both write there

"""
TIMEOUT_S = 30.0


def run(script: str, *more: str) -> subprocess.Popen[str]:
    """A node of two processes that do what a script says."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", NODE, TELL + script, *more], text=True, **streams)  # type: ignore[call-overload,no-any-return]


def is_there(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_process_is_told_which_one_it_is_and_its_nodes_name() -> None:
    script = "tell(number, os.environ['LOCAL_WORLD_SIZE'], os.environ['HEADRACE_RELAY'], *sys.argv[1:])"
    node = run(script)
    out, _ = node.communicate(timeout=TIMEOUT_S)
    assert node.returncode == 0
    assert sorted(out.splitlines()) == ["0 2 0 --node n0", "1 2 0 --node n0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "process 1 of node n0 ended with exit code 3: the others end with it"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "process 1 of node n0 was ended by SIGKILL: the others end with it"),
    ],
)
def test_a_process_that_is_lost_takes_the_others_with_it(end: str, code: int, words: str) -> None:
    """Also one that has stopped, and so does not end by itself."""
    stops = "tell(os.getpid()); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"
    node = run(f"if number == '1': time.sleep(0.5); {end}\n{stops}", "0.1")
    out, err = node.communicate(timeout=TIMEOUT_S)
    assert node.returncode == code
    assert words in err
    assert not is_there(int(out))


def test_sigterm_is_passed_on_and_the_node_ends_when_all_have_left() -> None:
    script = """
left = []
signal.signal(signal.SIGTERM, lambda *_: left.append(1))
tell("ready")
while not left: time.sleep(0.01)
tell("left")
"""
    node = run(script)
    assert node.stdout is not None
    assert [node.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    node.send_signal(signal.SIGTERM)
    out, _ = node.communicate(timeout=TIMEOUT_S)
    assert (node.returncode, out) == (0, "left\n" * 2)


def test_ctrl_c_leaves_nothing_behind() -> None:
    node = run("signal.signal(signal.SIGINT, signal.SIG_IGN); tell(os.getpid()); time.sleep(60)")
    assert node.stdout is not None
    pids = [int(node.stdout.readline()) for _ in range(2)]
    node.send_signal(signal.SIGINT)
    node.communicate(timeout=TIMEOUT_S)
    assert node.returncode != 0
    assert not any(map(is_there, pids))


def test_processes_end_with_the_one_that_has_started_them(tmp_path: Path) -> None:
    """As `start_process` starts them, here with a `headrace` that does not end by itself: it waits for its token."""
    script = """
from headrace.cli.run import node_processes
arguments = ["train", "--job", "job", "--cluster-token-file", sys.argv[1]]
print(node_processes.start_process(arguments, {}).pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", "import sys, time\n" + script, str(tmp_path / "token")]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    pid = int(node.stdout.readline())
    assert is_there(pid)
    node.kill()
    node.communicate()
    deadline_s = time.monotonic() + TIMEOUT_S
    while is_there(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)  # polls a real process
    assert not is_there(pid)


def test_a_process_is_the_one_that_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_process(1) == 0
    assert own_process(2) is None
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_process(1) == 0, "under any launcher, as before"
    assert own_process(2) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"process 1 of 4 on this host, but the nodes' spec has gpus_per_node 2: start as many"):
        own_process(2)


@pytest.mark.parametrize(("text", "number"), [("nodes: 3", 1), ("gpus_per_node: 2", 2), ("gpus_per_node: two", 1)])
def test_the_spec_says_how_many_processes_a_node_has(tmp_path: Path, text: str, number: int) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    assert processes_in(path) == number


def test_children_share_the_threads_of_this_process_unless_a_user_has_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable_processors()))
    monkeypatch.setenv("NUMBA_NUM_THREADS", str(usable_processors() + 1))
    assert shares(2) == {"OMP_NUM_THREADS": str(max(1, usable_processors() // 2))}


def test_a_spec_that_is_no_yaml_is_refused_before_any_process_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes: [")
    assert main(["train", "--endpoint", "127.0.0.1:1", "--job", "job", "--nodes", str(path)]) == 2
    assert "nodes.yaml" in capsys.readouterr().err
    assert os.environ.get("LOCAL_RANK") is None
