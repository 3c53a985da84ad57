"""The reference of the library: names, signatures and docstrings, read from the sources without importing them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from website.prose import definition, escaped, paragraphs

ROOT = Path(__file__).parents[1]
PORTIONS = ("trainer", "proto", "cli", "preprocessor", "reorder_service")
_INTRODUCTION = """# Python

What a training loop imports. [The loader in your training loop](../loader.md) and [jobs and services from Python](../python.md)
say how it is used; what else there is to import is on the pages that need it.

"""
_LONGEST = 100  # characters of a signature on one line
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_PROPERTIES = ("property", "functools.cached_property", "cached_property")


class Room(NamedTuple):
    """Names of one module that belong to the library."""

    module: str
    line: str
    names: Sequence[str] = ()
    """Empty: those of the module's `__all__`, or else all its own that are public."""


TRAINER = ("connect", "StepLoader", "Step", "Microbatch", "Parallel", "local", "LocalJob", "replan")
ERRORS = (
    "HeadraceError",
    "UserError",
    "SpecError",
    "DatasetError",
    "NotFoundError",
    "UnknownTicketError",
    "ConflictError",
    "EndpointError",
    "UnauthenticatedError",
    "RoleError",
    "LimitError",
    "PermissionDeniedError",
    "SupersededError",
    "JobFailedError",
    "UnrecoverableError",
    "UnavailableError",
)
ROOMS = (
    Room("headrace.trainer", "Steps for a training loop.", TRAINER),
    Room("headrace.trainer.loading.collate", "The tensors of a microbatch.", ("PackedMicrobatch",)),
    Room("headrace.trainer.loading.padded", "The same with a row for each sample.", ("PaddedMicrobatch",)),
    Room("headrace.trainer.loading.slices", "Orders of context-parallel slices.", ("Balanced",)),
    Room("headrace.trainer.loading.statistics", "What a loader counts."),
    Room("headrace.trainer.orchestrated", "FSDP ranks that have all units."),
    Room("headrace.trainer.integrations.huggingface_trainer", "For the Trainer of transformers."),
    Room("headrace.trainer.integrations.accelerate_loader", "For Accelerate."),
    Room("headrace.trainer.integrations.lightning_loader", "For Lightning."),
    Room("headrace.trainer.integrations.megatron_batches", "For Megatron-Core."),
    Room("headrace.trainer.integrations.torchtitan_loader", "For torchtitan."),
    Room("headrace.trainer.integrations.dynamic_batches", "For VeOmni and verl."),
    Room("headrace.trainer.integrations.step_stream", "For a loop that says nothing of commits."),
    Room("headrace.jobs", "Jobs: submitting, watching, changing.", ("Jobs", "JobStatus", "JobState")),
    Room("headrace.ray", "Preprocessors on a Ray cluster."),
    Room("headrace.errors", "What is raised.", ERRORS),
)


class Thing(NamedTuple):
    """A class or function of the library."""

    module: str
    """By which it is imported."""
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def anchor(self) -> str:
        return f"{self.module}.{self.node.name}"


def things(room: Room) -> list[Thing]:
    """Return the classes and functions of a room. Raises LookupError for a name that its module does not have."""
    return [Thing(room.module, _definition(room.module, name)) for name in _names(room)]


class Member(NamedTuple):
    """An attribute, property or method of a class."""

    name: str
    written: str
    """As in the code: `num_targets: int`, `commit(step: Step) -> None`."""
    docstring: str
    is_method: bool


def members(node: ast.ClassDef) -> list[Member]:
    """Return the public members of a class, in the order of its body."""
    found = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = f" = {ast.unparse(statement.value)}" if isinstance(statement.value, ast.Constant) else ""
            written = f"{statement.target.id}: {ast.unparse(statement.annotation)}{default}"
            found.append(Member(statement.target.id, written, _string(following), is_method=False))
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found.append(Member(statement.targets[0].id, ast.unparse(statement), _string(following), is_method=False))
        elif isinstance(statement, _FUNCTIONS):
            is_method = not any(ast.unparse(one) in _PROPERTIES for one in statement.decorator_list)
            returns = f": {ast.unparse(statement.returns)}" if statement.returns else ""
            written = _signature(statement) if is_method else f"{statement.name}{returns}"
            found.append(Member(statement.name, written, ast.get_docstring(statement) or "", is_method))
    return [member for member in found if not member.name.startswith("_")]


def page() -> str:
    """Return the page."""
    return _INTRODUCTION + "".join(map(_section, ROOMS))


def _section(room: Room) -> str:
    found = things(room)
    return f"## `{room.module}` {{#{room.module}}}\n\n{escaped(room.line)}\n\n" + "".join(map(_thing, found))


def _thing(thing: Thing) -> str:
    node = thing.node
    parts = [f"### `{node.name}` {{#{thing.anchor}}}\n\n"]
    if not isinstance(node, ast.ClassDef):
        return f"{parts[0]}{_code(_signature(node))}{paragraphs(ast.get_docstring(node) or '')}\n\n"
    bases = [ast.unparse(base) for base in node.bases]
    made = next((one for one in node.body if isinstance(one, _FUNCTIONS) and one.name == "__init__"), None)
    written = _signature(made, node.name) if made else node.name
    parts.append(_code(f"class {written}" if not bases else f"class {written}  # {', '.join(bases)}"))
    parts.append(f"{paragraphs(ast.get_docstring(node) or '')}\n\n")
    if made and (said := ast.get_docstring(made)):
        parts.append(f"{paragraphs(said)}\n\n")
    for member in sorted(members(node), key=lambda member: member.is_method):
        if member.is_method:
            parts.append(f"#### `{member.name}` {{#{thing.anchor}.{member.name}}}\n\n{_code(member.written)}")
            parts.append(f"{paragraphs(member.docstring)}\n\n")
        elif member.docstring:
            parts.append(definition(f"`{member.written}`", paragraphs(member.docstring)))
        else:
            parts.append(f"`{member.written}`\n\n")
    return "".join(parts)


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n\n"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str = "") -> str:
    """Return how a function is called, without `self`, on as many lines as it takes. `name`: in place of its own."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    shown = [_argument(one, default) for one, default in zip(positional, defaults, strict=True)]
    if shown and positional[0].arg in ("self", "cls"):
        shown = shown[1:]
    if arguments.vararg:
        shown.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_argument(one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        shown.append(f"**{_argument(arguments.kwarg, None)}")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    line = f"{name or node.name}({', '.join(shown)}){returns}"
    if len(line) <= _LONGEST:
        return line
    return f"{name or node.name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){returns}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    written = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    if default is None:
        return written
    return f"{written} = {ast.unparse(default)}" if argument.annotation else f"{written}={ast.unparse(default)}"


def _string(statement: ast.stmt | None) -> str:
    """Return the docstring that a statement is, or an empty text."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
        return ast.get_docstring(ast.Module(body=[statement], type_ignores=[])) or ""
    return ""


def _names(room: Room) -> Sequence[str]:
    if room.names:
        return room.names
    tree = _tree(room.module)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(statement.value)]
    own = (one.name for one in tree.body if isinstance(one, ast.ClassDef | _FUNCTIONS))
    return [name for name in own if not name.startswith("_")]


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    """Return where a name of a module is defined, there or where it is imported from."""
    for statement in _tree(module).body:
        if isinstance(statement, ast.ClassDef | _FUNCTIONS) and statement.name == name:
            return statement
        if isinstance(statement, ast.ImportFrom) and statement.module and any(one.name == name for one in statement.names):
            return _definition(statement.module, name)
    raise LookupError(f"{module} has no {name}")


@functools.cache
def _tree(module: str) -> ast.Module:
    relative = Path(*module.split("."))
    files = (ROOT / portion / end for portion in PORTIONS for end in (relative.with_suffix(".py"), relative / "__init__.py"))
    return ast.parse(next(file for file in files if file.exists()).read_text(encoding="utf-8"))
