"""What README.md says happens to somebody who has Headrace: all of it but `make`, which takes a clone, and containers."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.endpoint import DEFAULT_ENDPOINT
from headrace.cli.main import _parse
from tests.tutorials.tutorial_page import ROOT, Block, blocks, headrace_commands, indented_commands
from tests.tutorials.tutorial_session import Session

README = ROOT / "README.md"
DATA = "DATA=$(python -c 'from headrace.cli.example import example_data; print(example_data())')\n"
"""What the test has for the page's PATH."""
UNTIL_IT_SERVES = f"until headrace health {DEFAULT_ENDPOINT} 2> /dev/null | grep -x serving; do sleep 1; done\n"
MODEL = """\
import torch
from torch.nn.functional import cross_entropy
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8192, 16)
        self.head = torch.nn.Linear(16, 8192)
    def forward(self, data):
        return cross_entropy(self.head(self.embedding(data.input_ids)), data.labels, reduction="sum")
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
"""What is the reader's in the page's loop."""


def commands() -> list[Block]:
    return list(indented_commands(README, "headrace"))


def as_carried_out(block: Block) -> Block:
    """With a data set for PATH, and services in the background."""
    text = re.sub(r"\bPATH\b", "$DATA", block.text)
    [arguments] = headrace_commands(text)
    if arguments[0] in ("reorder", "preprocessor"):
        text = f"headrace {' '.join(arguments)} > {arguments[0]}.log 2>&1 & {UNTIL_IT_SERVES}"
    return replace(block, text=text)


def in_prose(command: str) -> Block:
    """A command that the page names within a line."""
    lines = README.read_text().splitlines()
    [line] = [number for number, line in enumerate(lines, 1) if f"`{command}`" in line]
    return Block(page="README.md", line=line, language="bash", text=f"{command}\n")


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_the_first_page_does_what_it_says(tmp_path: Path) -> None:
    host, _, port = DEFAULT_ENDPOINT.partition(":")
    with socket.socket() as asking:
        assert asking.connect_ex((host, int(port))), f"something listens at {DEFAULT_ENDPOINT}, where the page has its service"
    [loop] = [block for block in blocks(README) if block.language == "python"]
    with Session(tmp_path, ports=()) as session:
        session.run(Block(page=Path(__file__).name, line=1, language="bash", text=DATA))
        said = {block.line: session.run(as_carried_out(block)) for block in commands()}
        assert "job demo: done" in said[max(said)], "that of `headrace train`"
        assert (tmp_path / "work" / "headrace-demo" / "timeline.png").is_file()
        session.run(in_prose("headrace job submit headrace-demo/job.yaml"))
        session.run(in_prose("headrace job reset demo --step 0"))
        session.run(replace(loop, line=loop.line - MODEL.count("\n"), text=MODEL + loop.text))
        shown = session.run(replace(loop, language="bash", text="headrace job show demo\n"))
        assert "job demo: done" in shown, "by the loop"
        session.run(in_prose("headrace doctor"))


def test_headrace_takes_every_command() -> None:
    found = [arguments for block in commands() for arguments in headrace_commands(block.text)]
    assert len(found) > 10
    for arguments in found:
        _parse(arguments)
