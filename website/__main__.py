"""Build the site: `python -m website` writes Markdown to build/pages, HTML to build/site, and checks every link of the latter."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from website import html_links, site_pages
from website.site_pages import ROOT, Site

BUILD = ROOT / "build"
PAGES, HTML, CONFIGURATION = BUILD / "pages", BUILD / "site", BUILD / "mkdocs.yml"
SETTINGS = Path(__file__).parent / "mkdocs.yml"


def main() -> int:
    """Build the site and return the process's exit code."""
    if importlib.util.find_spec("material") is None:
        print("website: this installation lacks mkdocs-material: run `make docs`", file=sys.stderr)
        return 2
    site = site_pages.collect()
    _write(site)
    CONFIGURATION.write_text(_configuration(site), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(CONFIGURATION)]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False)
    if built.returncode:
        return built.returncode
    found = html_links.check(HTML)
    for fault in found.faults:
        print(fault, file=sys.stderr)
    print(f"{found.num_pages} pages with {found.num_links} links among them, {len(found.faults)} at fault, in {HTML}")
    return 1 if found.faults else 0


def _write(site: Site) -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for place, text in site.pages.items():
        _folder(PAGES / place).write_text(text, encoding="utf-8")
    for place, file in site.files.items():
        shutil.copyfile(file, _folder(PAGES / place))


def _folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _configuration(site: Site) -> str:
    """Return MkDocs' configuration: the settings beside this file, and what only this build knows."""
    groups = [{name: [{title: place} for title, place in pages.items()]} for name, pages in site.navigation.items()]
    built = {
        "INHERIT": os.path.relpath(SETTINGS, CONFIGURATION.parent),
        "docs_dir": str(PAGES),
        "site_dir": str(HTML),
        "nav": [{"All pages": site_pages.place(site_pages.INDEX)}, *groups],
    }
    if url := site_pages.repository():
        built["repo_url"] = url
    return yaml.safe_dump(built, sort_keys=False)


if __name__ == "__main__":
    sys.exit(main())
