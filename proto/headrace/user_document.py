"""Reading and checking documents that users write (YAML or JSON), with one-sentence errors that name the wrong field.

Other processes send such documents on as JSON, and may be of a newer release: of theirs, fields that this release does not know
are ignored.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from headrace.errors import SpecError
from headrace.observability.logs import pairs
from headrace.printable import printable

log = logging.getLogger(__name__)

Document = TypeVar("Document", bound=BaseModel)


class SpecSection(BaseModel):
    """A section of a document that users write: immutable, without unknown keys, and strict about truth values for numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError(f"must be a number or a text, got {str(value).lower()}")
        return value


def parse(kind: type[Document], document: Any, what: str) -> Document:
    """Return a document of class `kind`, validated from plain data. Raises SpecError with a sentence on the first wrong field.

    `what`: the document's name in that sentence, such as "job spec".
    """
    if not isinstance(document, dict):
        raise SpecError(f"a {what} is a mapping of fields, lines such as `field: value`; got {_kind_of(document)}")
    try:
        checked = kind.model_validate(document)
        checked.model_dump_json()  # other processes get it as JSON, so it must have a JSON form
        return checked
    except ValidationError as err:
        raise SpecError(_sentence(err, what, kind)) from err
    except (ValueError, RecursionError) as err:  # a lone surrogate, an integer of thousands of digits
        raise SpecError(f"the {what} cannot be written as JSON: {printable(str(err))}") from err


def parse_json(kind: type[Document], text: str, what: str) -> Document:
    """Return a document of class `kind`, validated from JSON text. Raises SpecError, which calls the document `what`."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as err:
        raise SpecError(_sentence(err, what, kind)) from err


def parse_peer_json(kind: type[Document], text: str, what: str, carried_out: Collection[str] = ()) -> Document:
    """Return a document of class `kind`, validated from JSON text of another process, which may be of a newer release.

    Fields that this release does not know are ignored and logged, except within the top-level fields `carried_out`: what this
    process itself does by those would come out otherwise than the newer release means.

    Raises SpecError, which calls the document `what`.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as err:
        details = err.errors(include_url=False)
        unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
        if not unknown or any(loc[0] in carried_out for loc in unknown if len(loc) > 1):
            raise SpecError(_sentence(err, what, kind)) from err
    try:
        document = kind.model_validate_json(text, extra="ignore")
    except ValidationError as err:
        raise SpecError(_sentence(err, what, kind)) from err
    fields = ",".join(sorted(printable(".".join(map(str, loc)))[:_MOST_SHOWN] for loc in unknown))
    log.warning("fields of a newer release are ignored %s", pairs(document=what, fields=fields))
    return document


def read_yaml(path: Path, what: str) -> Any:
    """Return the plain data in a YAML file. Raises SpecError, which calls the document `what`, if it cannot be read or parsed."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except (OSError, UnicodeDecodeError) as err:
        raise SpecError(f"cannot read the {what} {path}: {getattr(err, 'strerror', None) or err}") from err
    except yaml.YAMLError as err:
        raise SpecError(f"{path} is not valid YAML: {printable(' '.join(str(err).split()))}") from err
    except (ValueError, RecursionError) as err:  # an integer of thousands of digits, an impossible date; too deep nesting
        raise SpecError(f"{path} is not a {what}: {printable(str(err))}") from err


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of a file before what a SpecError of the block says of its content."""
    try:
        yield
    except SpecError as err:
        raise SpecError(f"{path}: {err}") from err


def _kind_of(document: Any) -> str:
    """Return what plain data that is no mapping is, in words."""
    if document is None:
        return "nothing"
    return "a list" if isinstance(document, list) else f"only {printable(repr(document))[:_MOST_SHOWN]}"


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses numbers which YAML 1.1 misreads: 010 as 8 (octal), and 1:30:00 as 5400 (base 60)."""

    yaml_implicit_resolvers = yaml.SafeLoader.yaml_implicit_resolvers.copy()

    def _refuse(self, node: yaml.ScalarNode) -> None:
        raise yaml.constructor.ConstructorError(
            problem=f"{node.value} would be read as another number: write a decimal one, or put a text in quotes",
            problem_mark=node.start_mark,
        )


_MISREAD = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
for _first in "-+0123456789":
    _Loader.yaml_implicit_resolvers[_first] = [("!misread", _MISREAD), *_Loader.yaml_implicit_resolvers.get(_first, [])]
_Loader.add_constructor("!misread", _Loader._refuse)

_PHRASES = {
    "extra_forbidden": "there is no such field",
    "missing": "is required",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of fields",
    "string_pattern_mismatch": "must be at most 63 letters, digits, '.', '_' or '-', beginning with a letter or digit",
}


_ALIKE = 0.75  # of two names, by difflib's ratio, for one to be a misspelling of the other
_MOST_SHOWN = 80  # characters of a wrong value, or of a field's path, that an error shows


def _shown(value: str | int | float) -> str:
    if isinstance(value, int) and abs(value) > 1 << 256:
        return "an integer of many digits"
    text = repr(value[: 2 * _MOST_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _fields_at(kind: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the names of the fields of the section at `path` of a document; none where that may be of several classes."""
    for part in path:
        if part not in kind.model_fields:  # a place in a list or a mapping, whose sections are alike
            continue
        inner = [kind.model_fields[str(part)].annotation]
        while inner and not any(isinstance(one, type) and issubclass(one, BaseModel) for one in inner):
            inner = [argument for one in inner for argument in get_args(one)]
        sections = [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]
        if len(sections) != 1:
            return []
        kind = sections[0]
    return list(kind.model_fields)


def _sentence(error: ValidationError, what: str, kind: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    field = printable(".".join(str(part) for part in first["loc"]))[:_MOST_SHOWN] or what
    message = _PHRASES.get(first["type"], first["msg"].removeprefix("Value error, ").replace("Input should be", "must be"))
    got = (
        f", got {_shown(first['input'])}"
        if isinstance(first["input"], str | int | float) and first["type"] != "value_error"
        else ""
    )
    alike: list[str] = []
    if first["type"] == "extra_forbidden":
        *path, last = first["loc"]
        alike = difflib.get_close_matches(str(last), _fields_at(kind, path), 1, _ALIKE)
    meant = f"; did you mean {alike[0]}?" if alike else ""
    more = error.error_count() - 1
    return f"{field}: {message}{got}{meant}" + (f" (and {more} more)" if more else "")
