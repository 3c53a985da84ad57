"""Bounds for what a chat template makes: a short one could ask for gigabytes, by a product, a width or a text put to itself.

What an operation would make is foreseen from its operands, and refused before it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.quarantine import BadSampleError, Reason

_MOST_ITEMS = 1_000_000
"""What a product, a width or a replacement may always make, in characters or items."""
_MOST_EXPONENT = 64
_WIDE = re.compile(r"%[^%a-zA-Z]*(?:[0-9]{5,}|\*)")  # a format of a width of five digits or more, or one that is an argument
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:[0-9]{5,}|\{)")  # the same for `str.format`
_GROWING = ("center", "indent", "format", "batch", "slice", "replace", "join")
"""Filters that may make much of little."""
_CONCATENATE = "_headrace_concatenate"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no text, list or number becomes huge.

    A rendering that would make one raises TemplateError, or BadSampleError (too_long) where it puts texts together.
    """

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, max_characters: int, **options: Any) -> None:
        """`max_characters`: most characters of a text that is put together of others."""
        super().__init__(**options)
        self._max_characters = max_characters
        for name in _GROWING:
            self.filters[name] = self._bounded(name, FILTERS[name])
        self.globals[_CONCATENATE] = self._concatenate

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sequences = [side for side in (left, right) if isinstance(side, str | list | tuple)]
        numbers = [side for side in (left, right) if isinstance(side, int)]
        if operator == "+" and len(sequences) == 2:
            self._check_together(sequences)
        elif operator == "*" and sequences and numbers:
            self._check_made(operator, len(sequences[0]) * numbers[0])
        elif operator == "%" and isinstance(left, str):
            self._check_format(operator, left)
        elif operator == "**" and isinstance(right, int) and abs(right) > _MOST_EXPONENT:
            raise TemplateError(f"{operator} would make a number of more than {_MOST_EXPONENT} times the digits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 -- as the base class has it
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `str.format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            __self._check_growth(method.__name__, text, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def _bounded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return one of Jinja's filters that refuses what would make something huge."""
        passed = ["context"] if hasattr(original, "jinja_pass_arg") else []  # what some filters get in front

        def bounded(*arguments: Any, **named: Any) -> Any:
            context, value, others = arguments[: len(passed)], arguments[len(passed)], arguments[len(passed) + 1 :]
            if name == "join" and not isinstance(value, Collection):
                value = list(value)
            self._check_growth(name, value, [*others, *named.values()])
            return original(*context, value, *others, **named)

        if passed:
            bounded.jinja_pass_arg = original.jinja_pass_arg  # type: ignore[attr-defined]
        return bounded

    def _concatenate(self, *values: Any) -> str:
        """Do what a template's `~` does."""
        texts = list(map(str, values))
        self._check_together(texts)
        return "".join(texts)

    def _check_growth(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Refuse a filter, or a method of a string, that would make much of its value."""
        numbers = [argument for argument in arguments if isinstance(argument, int)]
        texts = [argument for argument in arguments if isinstance(argument, str)]
        widest = max([*numbers, *map(len, texts)], default=0)
        match name:
            case "center" | "ljust" | "rjust" | "zfill" | "batch" | "slice":
                self._check_made(name, widest)
            case "indent" | "expandtabs":
                self._check_made(name, widest * (1 + str(value).count("\n") + str(value).count("\t")))
            case "replace" if len(texts) > 1:
                self._check_made(name, str(value).count(texts[0]) * len(texts[1]))
            case "format" | "format_map":
                self._check_format(name, str(value))
            case "join":
                joint, items = (
                    (value, arguments[0]) if isinstance(value, str) and arguments else (texts[0] if texts else "", value)
                )
                self._check_together([*(item for item in items if isinstance(item, str)), *[joint] * len(items)])

    def _check_format(self, name: str, pattern: str) -> None:
        if _WIDE.search(pattern) or _WIDE_FIELD.search(pattern):
            raise TemplateError(f"{name} takes no width of five digits or from an argument")

    def _check_made(self, name: str, made: int) -> None:
        if made > (most := max(_MOST_ITEMS, self._max_characters)):
            raise TemplateError(f"{name} would make more than {most} of something")

    def _check_together(self, parts: Sequence[Collection[Any]]) -> None:
        if sum(map(len, parts)) > self._max_characters:
            raise BadSampleError(Reason.TOO_LONG, f"the chat template writes more than {self._max_characters} characters")


def bound_concatenations(tree: nodes.Template) -> None:
    """Have every `~` of a template call a function of the environment, which cannot intercept it otherwise."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, value in list(parent.iter_fields()):
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _call(value))
            elif isinstance(value, list):
                value[:] = [_call(item) if isinstance(item, nodes.Concat) else item for item in value]


def _call(concatenation: nodes.Concat) -> nodes.Call:
    return nodes.Call(nodes.Name(_CONCATENATE, "load"), concatenation.nodes, [], None, None)
