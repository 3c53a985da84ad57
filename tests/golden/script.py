"""Read, run and write golden scripts.

A script is a text file of blocks, with empty lines between them. A block has commands, one a line, then a line `----`, and below
it what they print; a block without that line prints nothing. Lines that begin with `#` are comments, and the first ones say in a
sentence or two what the script tells. A command is a verb and its arguments: words, and options as NAME=VALUE. Each verb is the
file of its name in tests/golden/verbs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import redis

from tests.golden.virtual_time import ScriptLoop, script_time
from tests.golden.world import World
from tests.redis_server import RedisServer

HERE = Path(__file__).parent
FOLDERS = ("fleet", "job", "session", "membership")
BAR = "----"


class ScriptError(Exception):
    """A command cannot be run: there is no such verb, argument or client."""


def scripts() -> list[Path]:
    """Return all scripts, in order."""
    return sorted(path for folder in FOLDERS for path in (HERE / folder).glob("*.txt"))


def verbs() -> dict[str, Callable[..., Any]]:
    """Return the verbs by name."""
    names = sorted(path.stem for path in (HERE / "verbs").glob("[a-z]*.py"))
    return {name: importlib.import_module(f"tests.golden.verbs.{name}").run for name in names}


@contextlib.contextmanager
def store() -> Iterator[str]:
    """Run a Redis server for scripts, and yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server.url
        finally:
            server.kill()


def executed(path: Path, store_url: str) -> str:
    """Run a script, and return its text with what its commands print now. What was in the store before is dropped."""
    with redis.Redis.from_url(store_url) as client:
        client.flushall()
    loop = ScriptLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, script_time(loop):
        try:
            return runner.run(_execute(path.read_text(encoding="utf-8"), store_url, loop))
        except ScriptError as err:
            err.add_note(f"in {path}")
            raise


async def _execute(text: str, store_url: str, loop: ScriptLoop) -> str:
    world = World(store_url, loop)
    await world.start()
    try:
        return "\n\n".join([await _run_block(block.splitlines(), world) for block in text.strip().split("\n\n")]) + "\n"
    finally:
        await world.end()


async def _run_block(lines: list[str], world: World) -> str:
    commands = lines[: lines.index(BAR)] if BAR in lines else lines
    printed: list[str] = []
    for command in commands:
        if not command.startswith("#"):
            try:
                await _run_command(command, world)
            except Exception as err:
                raise ScriptError(f"{command}: {type(err).__name__}: {err}") from err
            printed += await world.printed()
    return "\n".join([*commands, BAR, *printed] if printed else commands)


async def _run_command(command: str, world: World) -> None:
    name, *words = shlex.split(command)
    verb = verbs()[name]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    bound = inspect.signature(verb).bind(world, *(word for word in words if "=" not in word), **options)
    for argument, kind in get_type_hints(verb).items():
        if argument in bound.arguments and kind in (int, float):
            bound.arguments[argument] = kind(bound.arguments[argument])
    await verb(*bound.args, **bound.kwargs)
