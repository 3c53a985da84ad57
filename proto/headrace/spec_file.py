"""Tells a file with a job spec from a data set, for those who take either."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import SpecError
from headrace.user_document import read_yaml

_YAML = (".yaml", ".yml")


def is_spec_file(path: str) -> bool:
    """Whether this is the path of a YAML file with a job spec, not of a blend of data sets, nor of a data set."""
    if not path.endswith(_YAML) or not Path(path).is_file():
        return False
    try:
        document = read_yaml(Path(path), "job spec")
    except SpecError:
        return False  # for whoever reads it as a blend of data sets to tell
    return isinstance(document, dict) and "sources" in document
