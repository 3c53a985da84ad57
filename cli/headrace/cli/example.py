"""Find the bundled example data, in the repository or in the installed package."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import UserError


def example_data() -> Path:
    """Return the folder of the bundled example data. Raises UserError if this installation has none."""
    package = Path(__file__).resolve().parent
    for folder in (package / "example_data", package.parents[2] / "examples" / "data"):
        if folder.is_dir():
            return folder
    raise UserError("the bundled example data is not part of this installation; name a data set: `headrace demo PATH`")
