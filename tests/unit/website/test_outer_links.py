"""Links to other hosts are found with the lines that they are in, and those that lead nowhere are told."""

from __future__ import annotations

from pathlib import Path

from tests.http_site import running_site
from website import outer_links

PAGE = """\
# A page

See [a](https://a.example/x#part), and `[not](https://code.example)`.

```bash
echo "[not](https://fence.example)"
```
[a](https://a.example/x), [b](http://b.example/y), [here](other.md)
"""


def test_links_are_found_with_their_lines(tmp_path: Path) -> None:
    for name in ("README.md", "docs/README.md", "docs/data.md", "docs/inner/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PAGE)
    (tmp_path / "build").mkdir()
    found = outer_links.collect(tmp_path)
    assert sorted(found) == ["http://b.example/y", "https://a.example/x"]
    assert sorted(found["http://b.example/y"]) == ["README.md:8", "docs/README.md:8", "docs/data.md:8", "docs/inner/page.md:8"]
    assert len(found["https://a.example/x"]) == 2 * len(found["http://b.example/y"])


def test_what_cannot_be_had_is_told_with_the_lines_that_link_to_it() -> None:
    with running_site() as site:
        site.files["there"] = b"x"
        addresses = {f"{site.url}/there": ["a.md:1"], f"{site.url}/gone": ["a.md:2", "b.md:3"]}
        assert outer_links.check(addresses) == [f"a.md:2, b.md:3: {site.url}/gone: 404 Not Found"]
        site.failures = [(403, {}), (500, {})]
        assert [outer_links.trouble(f"{site.url}/there") for _ in range(3)] == ["", "500 Internal Server Error", ""]
    assert "refused" in outer_links.trouble(f"{site.url}/there"), "nobody is there any more"


def test_pages_link_to_other_hosts() -> None:
    found = outer_links.collect()
    assert any(line.startswith("docs/comparison/loaders.md:") for lines in found.values() for line in lines)
    assert len(found) > 20
