"""The site has every page, in one navigation with docs/README.md, and no link in it is dead. MkDocs is not needed here."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

import pytest

from website import html_links, site_pages
from website.headings import CODE, anchors, outside_code, slug, title
from website.python_markdown import for_python_markdown
from website.site_pages import INDEX, READMES, REFERENCES, ROOT, Site, place

LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site() -> Site:
    return site_pages.collect()


def test_every_page_is_in_the_navigation_once(site: Site) -> None:
    listed = [at for pages in site.navigation.values() for at in pages.values()]
    docs = {place(path.relative_to(ROOT).as_posix()) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted((docs | set(READMES.values()) | set(REFERENCES)) - {place(INDEX)})


def test_titles_differ_within_a_group_and_are_no_file_names(site: Site) -> None:
    groups = {name: list(pages) for name, pages in site.navigation.items()}
    assert len(groups) > 5
    for titles in groups.values():
        assert len(titles) == len(set(titles)) > 0
        assert [one for one in titles if one.endswith(".md") or one.isupper()] == []


def test_the_list_of_pages_names_no_files(site: Site) -> None:
    listed = dict(re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", site.pages[place(INDEX)]))
    assert [words for words in listed if words.endswith(".md")] == []
    assert (listed["several-machines"], listed["who has a cluster"]) == ("several-machines.md", "tutorials/operator.md")


def test_no_link_leads_nowhere(site: Site) -> None:
    names = {at: anchors(text) for at, text in site.pages.items()}
    dead, seen = [], 0
    for at, text in site.pages.items():
        for link in LINK.findall(CODE.sub("", text)):
            if link.startswith(("http://", "https://", "mailto:")):
                continue
            seen += 1
            path, _, anchor = link.partition("#")
            target = os.path.normpath(PurePosixPath(at).parent / path) if path else at
            if (target not in site.pages and target not in site.files) or (anchor and anchor not in names[target]):
                dead.append(f"{at}: {link}")
    assert dead == []
    assert seen > 300


def test_every_file_that_is_shown_is_there(site: Site) -> None:
    assert [at for at, path in site.files.items() if not path.is_file()] == []
    assert "pictures/compare.png" in site.files
    assert "```python\n" in site.pages["source/proto/headrace/spec.py.md"]


def test_a_dead_link_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/data.md links to ../nothing.py, which there is not"):
        site_pages._relinked("docs/data.md", "[a](../nothing.py)", set())


@pytest.mark.parametrize(
    ("page", "link", "leads"),
    [
        ("README.md", "docs/data.md#media", "data.md#media"),
        ("docs/integrations/lightning.md", "../../README.md", "../index.md"),
        ("docs/data.md", "README.md", "pages.md"),
        ("docs/data.md", "../proto/headrace/spec.py", "source/proto/headrace/spec.py.md"),
        ("docs/data.md", "../tests/golden", "source/tests/golden/index.md"),
        ("CONTRIBUTING.md", ".ci/run", "../source/_.ci/run.md"),
        ("SECURITY.md", "docs/security.md", "../security.md"),
        ("docs/gpu.md", "../benchmarks/README.md#on-a-gpu", "project/benchmarks.md#on-a-gpu"),
        ("docs/gpu.md", "../benchmarks/results/gpu.json", "source/benchmarks/results/gpu.json"),
        ("docs/gpu.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/gpu.md", "#here", "#here"),
    ],
)
def test_a_link_between_files_is_one_between_pages(page: str, link: str, leads: str) -> None:
    assert site_pages._relinked(page, f"[words]({link}) and `[code]({link})`", set()) == f"[words]({leads}) and `[code]({link})`"


@pytest.mark.parametrize(
    ("written", "rewritten"),
    [
        ("text\n* one\n* two", "text\n\n* one\n* two"),
        ("* one\n  more\n\n  again\n\nout", "* one\n    more\n\n    again\n\nout"),
        ("1. one\n   - inner\n2. two", "1. one\n    - inner\n2. two"),
        ("* one\n\n  | a |\n  |---|\n  | b |", "* one\n\n    | a |\n    |---|\n    | b |"),
        ("text\n| a |\n|---|\n| `b \\| c` |", "text\n\n| a |\n|---|\n| `b | c` |"),
        ("* one\n  ```\n  x\n\n    y\n  ```\n* two", "* one\n\n    ```\n    x\n\n      y\n    ```\n* two"),
        ("```\n* no list\n1. none\n```\nafter", "```\n* no list\n1. none\n```\nafter"),
        ("in the year\n1984. it was", "in the year\n1984. it was"),
        ("* one\n## head\ntext", "* one\n## head\ntext"),
        ("text\n\n    code:\n    - code\n\n      - code\n", "text\n\n    code:\n    - code\n\n      - code"),
        ("* one\n\n      code\n\n  more", "* one\n\n        code\n\n    more"),
    ],
)
def test_markdown_is_what_python_markdown_reads_alike(written: str, rewritten: str) -> None:
    assert for_python_markdown(written) == f"{rewritten}\n"


def test_headings_have_the_names_that_code_hosts_give_them() -> None:
    assert slug("A `job`: what, and why?") == "a-job-what-and-why"
    page = "# One / two\n\n```\n# no heading\n```\n\n## [Three](x.md) `four`\n## Five {#own.name}\n"
    assert anchors(page) == {"one--two", "three-four", "own.name"}
    assert title(page) == "One / two"
    assert outside_code("a `a` a\n```\na\n```\na", lambda text: text.replace("a", "b")) == "b `a` b\n```\na\n```\nb"


def test_faults_of_built_pages_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">Other</h1><a href="index.html">back</a>', encoding="utf-8")
    (tmp_path / "index.html").write_text(
        '<link rel="canonical" href="https://example.org/"><script src="https://example.org/a.js"></script>'
        '<a href="other.html#here">1</a><a href="other.html#there">2</a><a href="/gone.html">3</a><a href="#">4</a>'
        '<a href="https://example.org/">5</a>',
        encoding="utf-8",
    )
    found = html_links.check(tmp_path)
    assert (found.num_pages, found.num_links) == (2, 5)
    assert found.faults == [
        "index.html loads https://example.org/a.js",
        "index.html links to other.html#there, a page without such a place",
        "index.html links to /gone.html, which there is not",
    ]
