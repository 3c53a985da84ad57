"""Print what a pyproject.toml depends on, with some of its extras: `requirements.py pyproject.toml EXTRA ...`.

Dependencies change seldom and sources often; with a list of their own they get an image layer of their own.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The dependencies and those of the extras, in order, each once. KeyError for an extra that does not exist."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return list(dict.fromkeys([*project["dependencies"], *(line for extra in extras for line in optional[extra])]))


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])))
