"""Runs Jinja chat templates as `transformers` does: the same settings, filters and functions, in a sandbox, and within bounds.

A template is code that comes with a tokenizer. It reaches nothing but what it is given, may loop so many times and write so many
characters, and knows no clock: the date is the one that the job names, so that a sample's tokens are the same every day.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace

from headrace.errors import SpecError
from headrace.preprocessor.text.template_bounds import BoundedEnvironment, bound_expressions
from headrace.quarantine import BadSampleError, Reason

MAX_STEPS = 1_000_000
"""Most rounds of loops and calls of macros for one sample: a conversation of 1,000 turns takes some thousands a rendering."""
_WIDEST_INDENT = 99
_MOST_PATTERN = 1000  # characters of a pattern of dates
_OURS = "_headrace"
_STEP, _MARKS = f"{_OURS}_step", f"{_OURS}_marks"  # names in the context of a rendering


class Steps:
    """Counts the steps of all renderings of a sample, and ends the one that takes too many."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def __call__(self) -> None:
        """Count a step. Raises TemplateError if there were too many."""
        self._left -= 1
        if self._left < 0:
            raise TemplateError(f"it takes more than {MAX_STEPS} steps")


class TodayUnknownError(BadSampleError):
    """A template asked for today's date, and the job names none."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a template has written."""

    text: str
    generated: list[tuple[int, int]]
    """Spans of characters [start, stop) that stood between `{% generation %}` and `{% endgeneration %}`."""


class JinjaTemplate:
    """A compiled chat template. Stateless and thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, Any], today: date | None, max_characters: int) -> None:
        """`variables` are there in every rendering; a rendering of more than `max_characters` is refused.

        Raises SpecError if the source is no Jinja.
        """
        environment = BoundedEnvironment(
            max_characters, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = partial(_to_json, environment)
        del environment.globals["lipsum"]  # sequences are the same in every process
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _clock_of(today),
            "namespace": _PlainNamespace,
        }
        if _OURS in source:
            raise SpecError(f"the chat template has a name with {_OURS}: take another")
        try:
            tree = environment.parse(source)
            self.constants = frozenset(_constants(tree))
            """The literal strings of the template, and the names of attributes and variables that it asks for."""
            self.has_generation = any(isinstance(node, nodes.CallBlock) and _is_generation(node) for node in _nodes(tree))
            """Whether the template marks what is learnt."""
            bound_expressions(tree)
            _count_steps(tree)
            self._environment, self._template = environment, environment.from_string(tree)
        except TemplateSyntaxError as err:
            raise SpecError(f"the chat template is no Jinja: line {err.lineno}: {err}") from err
        except RecursionError as err:
            raise SpecError("the chat template is nested too deeply") from err
        self._variables = dict(variables)
        self._max_characters = max_characters

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        steps: Steps,
        *,
        marks: tuple[str, str] = ("", ""),
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """Render a conversation. `steps` counts what it takes. `marks`: two characters that are nowhere in it, with which
        generated text is found.

        Raises BadSampleError with schema_error (the template refuses the conversation, fails on it, or asks for a date that
        nobody names) or too_long.
        """
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        bounds = {_STEP: steps, _MARKS: marks}
        written: list[str] = []
        size = 0
        self._environment.begin()
        try:
            for piece in self._template.generate(self._variables | variables | bounds):
                size += len(piece)
                if size > self._max_characters:
                    raise BadSampleError(Reason.TOO_LONG, f"the chat template wrote more than {self._max_characters} characters")
                written.append(piece)
        except (BadSampleError, MemoryError):
            raise
        except Exception as err:  # templates raise what Python raises for what they do with the data
            raise BadSampleError(Reason.SCHEMA_ERROR, f"the chat template refuses the conversation: {_told(err)}") from err
        return _unmarked("".join(written), marks)


class _Generation(Extension):
    """`{% generation %}`: puts marks around what it encloses."""

    tags = {"generation"}  # noqa: RUF012 -- as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, context: Context, caller: Macro) -> str:
        begin, end = context[_MARKS]
        return f"{begin}{caller()}{end}"


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach into Python."""

    def __init__(*args: Any, **values: Any) -> None:  # like Namespace's: a value may be called `self`
        self, *others = args
        Namespace.__init__(self)
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __repr__(self) -> str:
        return "<Namespace>"  # without its values, which may lead to themselves

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no {name!r}, which begins with an underscore")
        super().__setitem__(name, value)


def _to_json(
    environment: BoundedEnvironment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > _WIDEST_INDENT:
        raise TemplateError(f"tojson takes an indent of at most {_WIDEST_INDENT}")
    environment.size(value, indent if isinstance(indent, int) else len(indent or ""))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message if isinstance(message, str) else "it says why in no text")


def _clock_of(today: date | None) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        if today is None:
            raise TodayUnknownError(
                Reason.SCHEMA_ERROR,
                "the chat template writes today's date, so that sequences would be others every day: name a date in text.today",
            )
        if len(pattern) > _MOST_PATTERN:
            raise TemplateError(f"strftime_now takes a pattern of at most {_MOST_PATTERN} characters")
        return datetime.combine(today, time()).strftime(pattern)

    return strftime_now


def _nodes(tree: nodes.Template) -> list[nodes.Node]:
    return list(tree.find_all(nodes.Node))


def _constants(tree: nodes.Template) -> list[str]:
    found = []
    for node in _nodes(tree):
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, nodes.TemplateData):
            found.append(node.data)
        elif isinstance(node, nodes.Getattr):
            found.append(node.attr)
        elif isinstance(node, nodes.Name):
            found.append(node.name)
    return found


def _is_generation(block: nodes.CallBlock) -> bool:
    callee = block.call.node
    return isinstance(callee, nodes.ExtensionAttribute) and callee.identifier == _Generation.identifier


def _count_steps(tree: nodes.Template) -> None:
    """Have every round of a loop and every call of a macro count as a step."""
    bodies = [loop.body for loop in tree.find_all(nodes.For)] + [macro.body for macro in tree.find_all(nodes.Macro)]
    for body in bodies:
        body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)))


def _unmarked(text: str, marks: tuple[str, str]) -> Rendering:
    """Take the marks out of a text. Raises BadSampleError (schema_error) if the template has torn them apart."""
    begin, end = marks
    if not begin or begin not in text:
        return Rendering(text, [])
    head, *parts = text.split(begin)
    pieces, spans, size = [head], [], len(head)
    for part in parts:
        generated, *tail = part.split(end)
        if len(tail) != 1:
            raise BadSampleError(Reason.SCHEMA_ERROR, "the chat template takes its generated text apart, so that none is known")
        spans.append((size, size + len(generated)))
        pieces += [generated, tail[0]]
        size += len(generated) + len(tail[0])
    return Rendering("".join(pieces), spans)


def _told(error: Exception) -> str:
    said = str(error) or type(error).__name__
    return said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"
