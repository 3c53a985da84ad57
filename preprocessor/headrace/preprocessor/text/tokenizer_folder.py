"""What lies beside a tokenizer.json, as Hugging Face tokenizers are published: its chat templates and the names of its tokens.

tokenizer_config.json           chat_template (a text, or a list of named ones), bos_token, eos_token, ...
chat_template.jinja             the template; it comes before the others
chat_template.json              the same under the key chat_template, as older processors of images have it
additional_chat_templates/      tool_use.jinja, for conversations with tools
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import DatasetError, SpecError
from headrace.preprocessor.sources.blob import read_url

_MAX_BYTES = 32 * 2**20  # a tokenizer_config.json lists all added tokens: 1.2 MB for Gemma 3
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, where there is one of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """The chat templates beside a tokenizer.json, and its named tokens."""

    template: str
    tool_template: str
    """The template for conversations with tools; mostly the same."""
    named_tokens: Mapping[str, str]
    """Special tokens by what they are: `bos_token`, `eos_token`, ..."""


def read_folder(tokenizer: str) -> TokenizerFolder:
    """Read the folder of the tokenizer.json at a path or fsspec URL. Raises SpecError if it has no chat template."""
    folder = tokenizer.rpartition("/")[0] if "/" in tokenizer else "."
    config = _json(f"{folder}/tokenizer_config.json")
    templates = _named(config.get("chat_template"), f"{folder}/tokenizer_config.json")
    templates |= _named(_json(f"{folder}/chat_template.json").get("chat_template"), f"{folder}/chat_template.json")
    for name, path in (("default", "chat_template"), (TOOL_USE, f"additional_chat_templates/{TOOL_USE}")):
        text = _read(f"{folder}/{path}.jinja")
        if text is not None:
            templates[name] = text
    if "default" not in templates:
        raise SpecError(
            f"text.template: there is no chat template beside {tokenizer}: neither chat_template.jinja nor one in "
            "tokenizer_config.json; put it there, or name another template"
        )
    tokens = {name: config.get(name) for name in _NAMED}
    contents = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return TokenizerFolder(
        template=templates["default"],
        tool_template=templates.get(TOOL_USE, templates["default"]),
        named_tokens={name: token for name, token in contents.items() if isinstance(token, str)},
    )


def _named(value: Any, path: str) -> dict[str, str]:
    """Return the templates of a field `chat_template` by name. Raises SpecError if it is of another form."""
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list() if all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value):
            return {str(item["name"]): str(item["template"]) for item in value}
        case dict():
            return {str(name): str(template) for name, template in value.items()}
    raise SpecError(f"text.template: chat_template in {path} is neither a text nor a list of named ones")


def _json(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no such file. Raises SpecError."""
    text = _read(path)
    try:
        document = json.loads(text) if text is not None else {}
    except ValueError as err:
        raise SpecError(f"text.template: {path} is no JSON: {err}") from err
    if not isinstance(document, dict):
        raise SpecError(f"text.template: {path} is no JSON object")
    return document


def _read(path: str) -> str | None:
    """Return the text of a file; None if there is no such file. Raises SpecError if it cannot be read."""
    try:
        return read_url(path, _MAX_BYTES).decode()
    except DatasetError as err:
        if isinstance(err.__cause__, FileNotFoundError):
            return None
        raise SpecError(f"text.template: {err}") from err
    except UnicodeDecodeError as err:
        raise SpecError(f"text.template: {path} is not UTF-8: {err}") from err
