"""The pages of the site: those of docs/, the readmes beside it, and a page for each file of the repository that they lead to.

Links between files of the repository become links between pages of the site, so that none leads out of it and none is dead.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from website import command_reference, job_reference, python_reference
from website.headings import outside_code, title
from website.python_markdown import for_python_markdown

ROOT = Path(__file__).parents[1]
INDEX = "docs/README.md"
READMES = {
    "README.md": "index.md",
    INDEX: "pages.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples/README.md": "project/examples.md",
}
"""Pages outside of docs/, and the index of docs/, which is no page's neighbour there -> their places in the site."""
REFERENCES = {
    "reference/commands.md": command_reference.page,
    "reference/job.md": job_reference.page,
    "reference/python.md": python_reference.page,
}
"""Places of the pages that are made from the code -> what makes them."""
BESIDE = {
    "icon.svg": ROOT / "reorder_service/headrace/reorder_service/page/static/icon.svg",
    "site.css": Path(__file__).parent / "site.css",
}
"""Places of files that every page loads (mkdocs.yml) -> where they are."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sbatch": "bash", ".proto": "protobuf"}
SHOWN_AS_THEY_ARE = (".json", ".csv", ".png")
"""Files that browsers show themselves; others are shown on a page."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?(?=\))")
_GROUP = re.compile(r"^\*\*(.+?)\.?\*\* (.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"\[([\w-]+)\.md\]\(")
"""A link by the name of a page's file, which the site does not have."""
_TARGET = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the site is made of. Places are paths below its root."""

    pages: Mapping[str, str]
    """Place -> Markdown."""
    files: Mapping[str, Path]
    """Place -> the file that is there as it is."""
    navigation: Mapping[str, Mapping[str, str]]
    """Group -> title of a page -> its place, in order."""


def collect() -> Site:
    """Return the whole site. Raises FileNotFoundError for a link to a file that there is not."""
    sources = [*READMES, *(path for path in _below_docs() if path != INDEX)]
    written = {place(path): (ROOT / path).read_text(encoding="utf-8") for path in sources}
    groups = navigation(written)
    found: set[str] = set()
    pages = {place(path): for_python_markdown(_relinked(path, written[place(path)], found)) for path in sources}
    for reference, make in REFERENCES.items():
        pages[reference] = make()
    pages[place(INDEX)] = _FILE_NAME.sub(r"[\1](", pages[place(INDEX)])
    groups["Look up"] = {title(pages[reference]): reference for reference in REFERENCES}
    beside = found - set(sources)
    shown = {path for path in beside if not path.endswith(SHOWN_AS_THEY_ARE)}
    pages |= {place(path): _shown(path, found | set(sources)) for path in sorted(shown)}
    return Site(pages=pages, files=BESIDE | {place(path): ROOT / path for path in sorted(beside - shown)}, navigation=groups)


def place(path: str) -> str:
    """Return where a file or folder of the repository is in the site."""
    if path in READMES:
        return READMES[path]
    if path.startswith("docs/") and (path.endswith(".md") or "/pictures/" in path):
        return path.removeprefix("docs/")
    shown = "source/" + "/".join(f"_{part}" if part.startswith(".") else part for part in path.split("/"))  # mkdocs hides .parts
    if path.endswith(SHOWN_AS_THEY_ARE):
        return shown
    return f"{shown}/index.md" if (ROOT / path).is_dir() else f"{shown}.md"


def navigation(written: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the groups of docs/README.md with their pages, by the words of the link to each, or by its heading where these are
    the name of a file or of what a readme is about."""
    groups: dict[str, dict[str, str]] = {}
    for name, text in _GROUP.findall(written[place(INDEX)]):
        places = {place(_joined(INDEX, target)): words for words, target in _TARGET.findall(text)}
        groups[name] = {_title(words, at, written[at]): at for at, words in places.items()}
    return groups


def _title(words: str, at: str, markdown: str) -> str:
    return title(markdown) if words.endswith(".md") or at in READMES.values() else words


def repository() -> str | None:
    """Return the URL of the repository that pyproject.toml names, if it names one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    return next((urls[name] for name in ("repository", "source", "homepage") if name in urls), None)


def _below_docs() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def _joined(page: str, target: str) -> str:
    return os.path.normpath(PurePosixPath(page).parent / target)


def _relinked(path: str, text: str, found: set[str]) -> str:
    """Return a page with its links between files as links between places; the files are added to `found`."""
    here = PurePosixPath(place(path)).parent

    def leads(link: re.Match[str]) -> str:
        target, anchor = link.group(1), link.group(2) or ""
        if not target:
            return anchor
        file = _joined(path, target)
        if not (ROOT / file).exists():
            raise FileNotFoundError(f"{path} links to {target}, which there is not")
        found.add(file)
        return os.path.relpath(place(file), here) + anchor

    return outside_code(text, lambda prose: _LINK.sub(leads, prose))


def _shown(path: str, linked: set[str]) -> str:
    """Return the page that shows a file, or lists a folder. `linked`: what has a place in the site."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    file = ROOT / path
    if file.is_dir():
        here = PurePosixPath(place(path)).parent
        names = sorted(one.relative_to(ROOT).as_posix() for one in file.iterdir() if one.name[0] not in "._")
        return head + "".join(
            f"* [{PurePosixPath(name).name}]({os.path.relpath(place(name), here)})\n" if name in linked else f"* `{name}`\n"
            for name in names
        )
    text = file.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{head}{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
