"""The README.md of a Hugging Face data set, whose YAML head may say which files are of which split.

    configs:
    - config_name: default
      data_files:
      - {split: train, path: data/train-*}
      - {split: test, path: [data/test-0.parquet, data/test-1.parquet]}

Of several configurations the default one is taken: that named `default`, or the one with `default: true`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

from headrace.errors import DatasetError

NAME = "README.md"
MAX_BYTES = 16 * 2**20
_MAX_HEAD = 2**20  # characters; parsing YAML takes a second per megabyte
MAX_GLOBS = 64
_MOST_PARTS, _MOST_FILES = 32, 100_000
_MOST_SHOWN = 8

Patterns = tuple[tuple[str, tuple[str, ...]], ...]
"""Splits with the patterns of their files."""


def patterns_of(card: bytes, where: str) -> Patterns:
    """Return the splits of the default configuration that a README.md declares; none where it declares no files.

    A configuration of a folder alone has the split "": what the names of its files tell.

    A README.md that is not understood declares none. Raises DatasetError where there are several configurations and none is
    the default. `where` is the data set in messages.
    """
    configs = [config for config in _configs(card) if _patterns(config)]
    if len(configs) > 1:
        default = [config for config in configs if config.get("default") is True or config.get("config_name") == "default"]
        if len(default) != 1:
            names = ", ".join(_text(config.get("config_name")) for config in configs[:_MOST_SHOWN])
            more = f" and {len(configs) - _MOST_SHOWN} more" if len(configs) > _MOST_SHOWN else ""
            raise DatasetError(
                f"the README.md of {where} has several configurations, {names}{more}, and none is the default: name the files of "
                "one, or say `split: all` in the source for every shard"
            )
        configs = default
    return _patterns(configs[0]) if configs else ()


def splits_of(names: Iterable[str], patterns: Patterns) -> dict[str, str]:
    """Return those of the names, relative to the README.md, that a pattern fits, with the first split that it is of.

    Raises DatasetError for more than MAX_GLOBS patterns with wildcards, or one of many parts.
    """
    plain: dict[str, str] = {}
    globs: list[tuple[str, list[str]]] = []
    for split, pattern in ((split, pattern.removeprefix("./")) for split, group in patterns for pattern in group):
        if any(character in pattern for character in "*?["):
            parts = pattern.split("/")
            globs.append(
                (split, [part for part, before in zip(parts, ["", *parts], strict=False) if part != "**" or part != before])
            )
        else:
            plain.setdefault(pattern.rstrip("/"), split)
    if any(len(parts) > _MOST_PARTS for _, parts in globs):
        raise DatasetError(f"the README.md has a pattern of more than {_MOST_PARTS} parts; name the files in the path")
    if len(globs) > MAX_GLOBS:
        raise DatasetError(f"the README.md has {len(globs)} patterns of files, more than {MAX_GLOBS}; name the files in the path")
    found = {}
    for name in names:
        parts = name.split("/")
        above = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))  # a pattern may be the name of a folder
        split_of_it = next((plain[path] for path in above if path in plain), None)
        if split_of_it is None:
            split_of_it = next((split for split, pattern in globs if _fits(parts, pattern)), None)
        if split_of_it is not None:
            found[name] = split_of_it
    return found


def _configs(card: bytes) -> list[dict[str, Any]]:
    text = card[: 4 * _MAX_HEAD].decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    head, end, _ = text.removeprefix("---\n").partition("\n---")
    if not text.startswith("---\n") or not end or len(head) > _MAX_HEAD:
        return []
    try:
        document = yaml.safe_load(head)
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    configs = document.get("configs") if isinstance(document, dict) else None
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _patterns(config: dict[str, Any]) -> Patterns:
    files = config.get("data_files")
    folder = _text(config.get("data_dir")).strip("/")
    if isinstance(files, str) or (isinstance(files, list) and all(isinstance(item, str) for item in files)):
        entries: list[tuple[Any, Any]] = [("train", files)]
    elif isinstance(files, list) and all(isinstance(item, dict) for item in files):
        entries = [(item.get("split", "train"), item.get("path")) for item in files]
    elif isinstance(files, dict):
        entries = list(files.items())
    elif folder:
        entries = [("", "**")]
    else:
        return ()
    if sum(len(paths) for _, paths in entries if isinstance(paths, list)) > _MOST_FILES:
        raise DatasetError(f"the README.md names more than {_MOST_FILES} files; name them in the path of the source")
    return tuple(
        (_text(split), tuple(f"{folder}/{path}".lstrip("/") for path in ([paths] if isinstance(paths, str) else paths)))
        for split, paths in entries
        if isinstance(paths, str) or (isinstance(paths, list) and all(isinstance(path, str) for path in paths))
    )


def _text(value: Any) -> str:
    """Return a string as it is and "" for anything else, which may be endless: YAML can refer to itself."""
    return value if isinstance(value, str) else ""


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path fits a glob pattern, both split at slashes; "**" stands for any number of parts."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])
