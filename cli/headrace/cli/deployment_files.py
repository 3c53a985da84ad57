"""Find the bundled manifests and scripts of `deploy/`, in the repository or in the installed package."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import UserError


def deployment_file(path: str) -> str:
    """Return the text of a file below `deploy`, by its path there. Raises UserError if this installation has none."""
    package = Path(__file__).resolve().parent
    for folder in (package / "deploy", package.parents[2] / "deploy"):
        if (file := folder / path).is_file():
            return file.read_text(encoding="utf-8")
    raise UserError(f"deploy/{path} is not part of this installation: install headrace from its wheel, or run it from a clone")
