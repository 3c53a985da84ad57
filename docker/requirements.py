"""Print what a pyproject.toml depends on, with some of its extras: `requirements.py pyproject.toml [EXTRA | -PACKAGE] ...`.

Dependencies change seldom and sources often; with a list of their own they get an image layer of their own. A package with a
minus is left out: an image has no use for it. `pip install headrace` brings all that the demo needs; here a package of an extra
comes only where that extra is named, so that a reorder service gets no torch:

    python docker/requirements.py pyproject.toml | pip install --constraint constraints.txt --requirement /dev/stdin
    pip install --no-deps .

More extras may stand in the environment, as `EXTRAS="s3 http"`: the images' build argument of that name.
"""

import os
import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str], unused: list[str]) -> list[str]:
    """Return the dependencies of every part and those of the extras, in order, each once, without packages that are `unused`.

    Raises KeyError for an extra that does not exist, and ValueError for an unused package that is not among the dependencies.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    of_extras = {_name(line) for lines in optional.values() for line in lines}
    base = [line for line in project["dependencies"] if _name(line) not in of_extras]
    lines = list(dict.fromkeys([*base, *(line for extra in extras for line in optional[extra])]))
    names = [_name(line) for line in lines]
    if unknown := set(unused) - set(names):
        raise ValueError(f"{pyproject} has no dependency {', '.join(sorted(unknown))}")
    return [line for line, name in zip(lines, names, strict=True) if name not in unused]


def _name(line: str) -> str:
    return re.split(r"[^\w.-]", line, maxsplit=1)[0]


if __name__ == "__main__":
    named = [*sys.argv[2:], *os.environ.get("EXTRAS", "").split()]
    extras = [name for name in named if not name.startswith("-")]
    print("\n".join(requirements(Path(sys.argv[1]), extras, [name[1:] for name in named if name.startswith("-")])))
