"""Bounds for what a chat template makes: a short one could ask for gigabytes, by a product, a width or a text put to itself.

What an operation would make is foreseen from its operands, and refused before it is made. A value that is no text is measured
before it becomes one: a list may have the same text a thousand times and take no room until then.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AnySet
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.quarantine import BadSampleError, Reason

_MOST_ITEMS = 1_000_000
"""What a product, a width or a replacement may always make, in characters or items."""
_MOST_OF_ALL = 64
"""A whole rendering makes, with all that it throws away, at most so many times of what one operation may make. One that puts
each of a thousand turns to the text before them makes 500 times that text."""
_MOST_EXPONENT = 64
_MOST_BITS = 4096  # of a number: Python writes none of more than 4,300 digits
_MOST_PRECISION = 100
_WIDE = re.compile(r"%[^%a-zA-Z]*(?:[0-9]{5,}|\*)")  # a format of a width of five digits or more, or one that is an argument
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:[0-9]{5,}|\{)")  # the same for `str.format`
_REFUSED_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
"""Filters that no chat template needs: they make much of little, or another thing every time."""
_REFUSED_METHODS = frozenset(("encode", "fromkeys", "maketrans", "to_bytes", "translate"))
"""Methods likewise, and those that make bytes, which are not measured."""
_UNMEASURED = ("attr", "count", "d", "default", "first", "items", "last", "length")
_LAZY = ("map", "reject", "rejectattr", "select", "selectattr")
"""Filters that pass on what they get, piece by piece."""
_CONCATENATE, _DISPLAY = "_headrace_concatenate", "_headrace_display"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no text, list or number becomes huge.

    A rendering that would make one raises TemplateError, or BadSampleError (too_long) where it puts texts together.
    """

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, max_characters: int, **options: Any) -> None:
        """`max_characters`: most characters of a text that is put together of others."""
        super().__init__(finalize=self._checked, **options)
        self._max_characters = max_characters
        self._most = max(_MOST_ITEMS, max_characters)
        self._made = threading.local()
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        for name in self.filters.keys() - {*_UNMEASURED, *_LAZY}:
            self.filters[name] = self._bounded(name, FILTERS[name])
        self.globals |= {_CONCATENATE: self._concatenate, _DISPLAY: self._display, "dict": self._dict}
        self.concat = self._joined  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begin to count what a rendering makes, in this thread."""
        self._made.total = 0

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sequences = [side for side in (left, right) if isinstance(side, str | list | tuple)]
        numbers = [side for side in (left, right) if isinstance(side, int)]
        if operator == "+" and len(sequences) == 2:
            self._check_together(sum(map(len, sequences)))
        elif operator == "*" and sequences and numbers:
            self._check_made(operator, self.size(sequences[0]) * numbers[0])
        elif operator == "*" and len(numbers) == 2:
            self._check_bits(operator, left.bit_length() + right.bit_length())
        elif operator == "%" and isinstance(left, str):
            self._check_format(operator, left, [right])
        elif operator == "**" and len(numbers) == 2:
            if abs(right) > _MOST_EXPONENT:
                raise TemplateError(f"{operator} would make a number of more than {_MOST_EXPONENT} times the digits")
            self._check_bits(operator, left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 -- as the base class has it
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `str.format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            args = tuple(map(__self._settled, args))
            __self._check_growth(method.__name__, text, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def size(self, value: Any, indent: int = 0) -> int:
        """Return about how many characters a value has as text, each of its parts at every place where it is.

        `indent`: blanks in front of a part for each value that it is in. Raises BadSampleError (too_long) if these are too many.
        """
        total, waiting = 0, [(value, 0)]
        while waiting:
            part, depth = waiting.pop()
            total += 1 + depth * indent
            if isinstance(part, str):
                total += len(part)
            elif isinstance(part, Mapping | list | tuple | AnySet | ValuesView):
                total += len(part)
                if total <= self._most:
                    inner = [item for pair in part.items() for item in pair] if isinstance(part, Mapping) else list(part)
                    waiting += [(item, depth + 1) for item in inner]
            if total > self._most:
                raise self._too_long(self._most)
        self._count(total)
        return total

    def _checked(self, value: Any) -> Any:
        """Return what a template writes, of which text will be made."""
        if not isinstance(value, str):
            self.size(value)
        return value

    def _bounded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return one of Jinja's filters that refuses what would make something huge."""
        passed = ["context"] if hasattr(original, "jinja_pass_arg") else []  # what some filters get in front

        def bounded(*arguments: Any, **named: Any) -> Any:
            context, (value, *others) = arguments[: len(passed)], map(self._settled, arguments[len(passed) :])
            self._check_growth(name, value, [*others, *named.values()])
            return original(*context, value, *others, **named)

        if passed:
            bounded.jinja_pass_arg = original.jinja_pass_arg  # type: ignore[attr-defined]
        return bounded

    def _settled(self, value: Any) -> Any:
        """Return what another filter gives piece by piece as a list, and everything else as it is."""
        if not isinstance(value, Iterator):
            return value
        items: list[Any] = []
        left = self._most
        for item in value:
            items.append(item)
            left -= self.size(item)
            if left < 0:
                raise self._too_long(self._most)
        return items

    def _concatenate(self, *values: Any) -> str:
        """Do what a template's `~` does."""
        return self._joined([str(self._checked(value)) for value in values])

    def _joined(self, pieces: Any) -> str:
        """Put texts together, also those that a block or a macro writes."""
        texts: list[str] = list(pieces)
        self._check_together(sum(map(len, texts)))
        return "".join(texts)

    def _display(self, value: Any) -> Any:
        """Return a list, tuple or dictionary that a template writes down."""
        self.size(value)
        return value

    def _dict(self, *values: Any, **named: Any) -> dict[Any, Any]:
        made = dict(*map(self._settled, values), **named)
        self.size(made)
        return made

    def _check_growth(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Refuse a filter, or a method of a string, that would make much of its value."""
        for each in (value, *arguments):
            if isinstance(each, str):
                self._count(len(each))
            else:
                self.size(each)
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
                self._check_format(name, str(value), arguments)
            case "round" if widest > _MOST_PRECISION:
                raise TemplateError(f"{name} takes a precision of at most {_MOST_PRECISION}")
            case "sum" if not all(isinstance(argument, str | int | float) for argument in arguments):
                raise TemplateError(f"{name} adds numbers")
            case "join":
                joint, items = (
                    (value, arguments[0]) if isinstance(value, str) and arguments else (texts[0] if texts else "", value)
                )
                num_items = len(items) if hasattr(items, "__len__") else 0
                self._check_together(self.size(items) - 2 * num_items - 1 + num_items * len(joint))

    def _check_format(self, name: str, pattern: str, values: Sequence[Any]) -> None:
        if _WIDE.search(pattern) or _WIDE_FIELD.search(pattern):
            raise TemplateError(f"{name} takes no width of five digits or from an argument")
        fields = pattern.count("%") + pattern.count("{")
        self._check_made(name, fields * sum(map(self.size, values)))

    def _check_bits(self, name: str, made: int) -> None:
        if made > _MOST_BITS:
            raise TemplateError(f"{name} would make a number of more than {_MOST_BITS} bits")

    def _check_made(self, name: str, made: int) -> None:
        if made > self._most:
            raise TemplateError(f"{name} would make more than {self._most} of something")
        self._count(made)

    def _check_together(self, made: int) -> None:
        if made > self._max_characters:
            raise self._too_long(self._max_characters)
        self._count(made)

    def _count(self, made: int) -> None:
        self._made.total = getattr(self._made, "total", 0) + max(0, made)
        if self._made.total > _MOST_OF_ALL * self._most:
            raise TemplateError(f"it makes more than {_MOST_OF_ALL * self._most} characters or items on the way")

    def _too_long(self, most: int) -> BadSampleError:
        return BadSampleError(Reason.TOO_LONG, f"the chat template writes more than {most} characters")


def bound_expressions(tree: nodes.Template) -> None:
    """Have every `~`, and every list, tuple and dictionary of a template, call a function of the environment, which cannot
    intercept them otherwise."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, value in list(parent.iter_fields()):
            if isinstance(value, nodes.Node):
                setattr(parent, name, _bound(value))
            elif isinstance(value, list):
                value[:] = [_bound(item) if isinstance(item, nodes.Node) else item for item in value]


def _bound(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _call(_CONCATENATE, node.nodes)
    is_display = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    if is_display and any(not isinstance(part, nodes.Const | nodes.Pair) for part in node.find_all(nodes.Expr)):
        return _call(_DISPLAY, [node])
    return node


def _call(name: str, arguments: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)
