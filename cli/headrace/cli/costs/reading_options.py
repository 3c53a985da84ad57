"""Command-line options that say which samples are read, and how they become tokens and patches: a job's settings, or single ones.

`headrace inspect`, `demo`, `compare` and `bench preprocess` have them, so that what is tried is what a job will do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.spec import JobSpec

READING_OPTIONS = ("spec", "mapping", "split", "tokenizer", "template", "max_pixels")
USUAL_PIXELS = 28 * 28 * 1280  # as in headrace.spec, which takes long to import
_OF_A_JOB = ("image", "audio", "text")
"""Sections of a job spec that say what a sample becomes."""


def add_reading_arguments(parser: argparse.ArgumentParser, usual_pixels: int = USUAL_PIXELS) -> None:
    """Add the options --spec, --mapping, --split, --tokenizer, --template and --max-pixels.

    usual_pixels: what --max-pixels is without it and without a job.
    """
    group = parser.add_argument_group("what is read, and how")
    group.add_argument(
        "--spec",
        type=Path,
        metavar="JOB.yaml",
        help="take the sources, and how they are read, from a job spec; PATH then chooses one of its sources by name",
    )
    group.add_argument(
        "--mapping",
        action="append",
        default=[],
        metavar="KEY=NAME",
        help="which field or tar extension is what: text=transcript, images=jpg, ignore=mp4,seg.png (docs/data.md); or a preset "
        "by name, such as llava; repeatable, and on top of the job's (default: auto, the usual names)",
    )
    group.add_argument(
        "--split",
        metavar="NAME",
        help="which split to take: train, validation, test, another name, or all (default: the job's, or the training split)",
    )
    group.add_argument(
        "--tokenizer", metavar="PATH", help="path or URL of a tokenizer.json (default: the job's, or the bundled one)"
    )
    group.add_argument("--template", metavar="NAME", help="prompt template, as in a job spec (default: the job's, or chatml)")
    group.add_argument(
        "--max-pixels", type=int, metavar="N", help=f"larger images are scaled down (default: the job's, or {usual_pixels:,})"
    )


def reading_spec(args: argparse.Namespace, job: Mapping[str, Any], source: Mapping[str, Any]) -> JobSpec:
    """Return the spec of a job that reads what the options of `add_reading_arguments` describe, with blends expanded.

    job: the other fields of the spec. source: the one to read where the options name no job, of `path` None if there is none.
    Raises UserError where options contradict each other, SpecError for values that a job spec may not have, DatasetError for a
    blend that cannot be read.
    """
    from headrace.preprocessor.sources.metadataset import expand
    from headrace.spec import parse_spec

    document = dict(job)
    if args.spec is None:
        _check_path(source["path"])
        document["sources"] = [dict(source)]
    else:
        document |= _of_job(args.spec, args.path)
    for chosen in document["sources"]:
        if args.mapping:
            chosen["mapping"] = changed_mapping(chosen.get("mapping", {}), args.mapping)
        if args.split is not None:
            chosen["split"] = args.split
    for section, field, value in (
        ("text", "tokenizer", args.tokenizer),
        ("text", "template", args.template),
        ("image", "max_pixels", args.max_pixels),
    ):
        if value is not None:
            document[section] = {**document.get(section, {}), field: value}
    return expand(parse_spec(document))


def changed_mapping(mapping: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any]:
    """Return a mapping's fields with what the values of --mapping change. Raises UserError for what no mapping has."""
    from headrace.mapping import MAPPING_PRESETS, MappingSpec

    changed = dict(mapping)
    given: set[str] = set()
    for option in options:
        key, equals, name = option.partition("=")
        if not equals:
            if option not in MAPPING_PRESETS:
                raise UserError(
                    f"--mapping {option}: there is no such preset, only {', '.join(MAPPING_PRESETS)}; a single field is KEY=NAME"
                )
            if given:
                raise UserError(f"--mapping {option} would undo what is given before it: put the preset in front")
            changed = MAPPING_PRESETS[option].model_dump()
            continue
        if key not in MappingSpec.model_fields:
            raise UserError(f"--mapping {option}: a mapping has no {key!r}; it has {', '.join(MappingSpec.model_fields)}")
        if not name:
            raise UserError(f"--mapping {option} names nothing; write {key}=NAME")
        texts, lists = _takes(MappingSpec.model_fields[key].annotation)
        if lists and ("," in name or not texts):
            before = changed.get(key) if key in given else None
            changed[key] = [*(before or ()), *(part.strip() for part in name.split(",") if part.strip())]
        elif key in given:
            raise UserError(f"--mapping gives {key} twice: {changed[key]} and {name}; it takes one")
        else:
            changed[key] = name
        given.add(key)
    return changed


def shown_source(args: argparse.Namespace) -> str:
    """Return what the user has named to be read, for titles."""
    if args.spec is None:
        return str(args.path)
    return str(args.spec) if args.path is None else f"{args.path} of {args.spec}"


def _takes(annotation: Any) -> tuple[bool, bool]:
    """Return whether a field takes a text, and whether it takes a list."""
    if get_origin(annotation) in (Union, UnionType):
        options = [_takes(option) for option in get_args(annotation)]
        return any(texts for texts, _ in options), any(lists for _, lists in options)
    lists = (get_origin(annotation) or annotation) in (tuple, list)
    return not lists and annotation is not type(None), lists


def _of_job(path: Path, name: str | None) -> dict[str, Any]:
    """Return the sources of a job, or the one that is called so, and its sections that say what a sample becomes."""
    from headrace.spec import load_spec_yaml

    spec = load_spec_yaml(path)
    chosen = [source for source in spec.sources if name in (None, source.name)]
    if not chosen:
        known = ", ".join(source.name for source in spec.sources)
        raise UserError(f"{path} has no source {name!r}: with --spec, PATH is the name of one of its sources, which are {known}")
    sections = {section: getattr(spec, section).model_dump() for section in _OF_A_JOB}
    return {"sources": [source.model_dump() for source in chosen], **sections}


def _check_path(path: str | None) -> None:
    """Raise UserError if there is no path, or it is that of a job spec."""
    from headrace.spec_file import is_spec_file

    if path is None:
        raise UserError("name a data set, PATH, or a job that says what to read, --spec JOB.yaml")
    if is_spec_file(path):
        raise UserError(f"{path} is a job spec, not a data set: give it as --spec {path}")
