"""The reference of a job's spec: every field with its type, limits, default and description, as the spec's models know them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.mapping import MAPPING_PRESETS
from headrace.model_shape import MODEL_SHAPES
from headrace.spec import STRATEGIES, JobSpec
from website.prose import definition, paragraphs

_INTRODUCTION = """# Fields of a job

Every field of the YAML that `headrace job submit` takes, with what it may be and its default; [the page on jobs](../jobs.md) has
those that most jobs name. *None* is a field without a value (`null`). A field that there is not is refused by its name.

The shortest job:

```yaml
{shortest}```

The same job with every field that has a default:

```yaml
{whole}```

`model` is one of {models}. `strategy` is one of {strategies} ([what they do](../strategies.md)). The presets of `mapping` are
{presets}.

"""
SHORTEST = {"name": "mine", "sources": [{"path": "examples/data"}]}


class Field(NamedTuple):
    """A field of a section."""

    name: str
    """As YAML has it."""
    description: str
    schema: Mapping[str, Any]
    required: bool
    default: Any


class Section(NamedTuple):
    """A section of the spec, or the whole."""

    path: str
    """Where it is first found: `execution.units.NAME`; empty: the job itself."""
    model: type[BaseModel]
    fields: tuple[Field, ...]


@functools.cache
def sections() -> Sequence[Section]:
    """Return the sections in the order in which fields lead to them, the job itself first."""
    schema = JobSpec.model_json_schema(by_alias=True)
    schemas = {JobSpec.__name__: schema, **schema["$defs"]}
    found: dict[type[BaseModel], Section] = {}
    waiting: list[tuple[str, type[BaseModel]]] = [("", JobSpec)]
    while waiting:
        path, model = waiting.pop(0)
        if model in found:
            continue
        found[model] = Section(path, model, tuple(_fields(model, schemas[model.__name__]["properties"])))
        for name, field in model.model_fields.items():
            for steps, inner in _models(field.annotation):
                waiting.append((f"{path}.{name}{steps}".lstrip("."), inner))
    return list(found.values())


def page() -> str:
    """Return the page."""
    every = sections()
    places = {section.model.__name__: section.path for section in every}
    whole = JobSpec.model_validate(SHORTEST).model_dump(mode="json", by_alias=True)
    introduction = _INTRODUCTION.format(
        shortest=_yaml(SHORTEST),
        whole=_yaml(whole),
        models=_codes(MODEL_SHAPES),
        strategies=_codes(STRATEGIES),
        presets=_codes(MAPPING_PRESETS),
    )
    return introduction + "".join(_section(section, places) for section in every)


def _yaml(document: Any) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100)


def _codes(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _fields(model: type[BaseModel], schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[Field]:
    for name, field in model.model_fields.items():
        shown = field.alias or name
        yield Field(shown, field.description or "", schemas[shown], field.is_required(), _default(field))


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def _models(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models in a field's annotation, with the steps from the field to them: `[]` for a list, `.NAME` for a mapping."""
    origin = get_origin(annotation)
    if origin is None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield "", annotation
        return
    step = "[]" if origin is tuple else ".NAME" if origin is dict else ""
    for inner in get_args(annotation):
        yield from ((step + steps, model) for steps, model in _models(inner))


def _section(section: Section, places: Mapping[str, str]) -> str:
    head = f"## `{section.path}` {{#{_anchor(section.path)}}}" if section.path else "## The job {#job}"
    terms = (definition(f"`{field.name}`", _meaning(field, places)) for field in section.fields)
    return f"{head}\n\n{paragraphs(section.model.__doc__ or '')}\n\n{''.join(terms)}"


def _anchor(path: str) -> str:
    return path.replace("[]", "").replace(".", "-").lower() or "job"


def _meaning(field: Field, places: Mapping[str, str]) -> str:
    default = "required" if field.required else _shown(field.default)
    kind = _kind(field.schema, places)
    return f"*{', '.join(filter(None, (kind, default)))}*\n\n{paragraphs(field.description)}"


def _shown(default: Any) -> str:
    """Return how a default is shown; empty for a section, whose own defaults are shown."""
    if isinstance(default, BaseModel):
        return ""
    return "default " + ("none" if default is None else f"`{json.dumps(default, default=list, ensure_ascii=False)}`")


def _kind(schema: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Return in words what values a JSON schema allows."""
    if "$ref" in schema:
        path = places[schema["$ref"].rpartition("/")[2]]
        return f"[section](#{_anchor(path)})"
    for several in ("anyOf", "allOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(one, places) for one in schema[several] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("prefixItems")
        inner = ", ".join(_kind(one, places) for one in items) if items else _kind(schema["items"], places)
        return f"list of {_counted(schema)}{inner}"
    if kind == "object":
        values = next(iter(schema.get("patternProperties", {}).values()), schema.get("additionalProperties"))
        return f"names with a value each: {_kind(values, places)}" if isinstance(values, dict) else "names with values"
    return _scalar(schema)


def _counted(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        return ""
    return "one or more, each: " if schema.get("minItems") == 1 else ""


def _scalar(schema: Mapping[str, Any]) -> str:
    kinds = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}
    kind = "date" if schema.get("format") == "date" else kinds.get(schema.get("type", ""), "anything")
    limits = {
        "minimum": "at least {:,}",
        "exclusiveMinimum": "above {:,}",
        "maximum": "at most {:,}",
        "exclusiveMaximum": "below {:,}",
        "minLength": "of at least {:,} characters",
        "maxLength": "of at most {:,} characters",
    }
    said = [words.format(schema[limit]) for limit, words in limits.items() if limit in schema]
    if "pattern" in schema:
        said.append(f"like `{schema['pattern']}`")
    return " ".join([kind, " and ".join(said)]).strip()
