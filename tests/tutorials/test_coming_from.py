"""The code of docs/coming-from: conversions give what the data had, and loops train."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import trainer
from headrace.cli.example import example_data
from headrace.jobs import Jobs
from headrace.spec import load_spec_yaml, parse_spec
from tests.layouts.plain import Sample, as_lines
from tests.layouts.verdict import plain_of, samples_of
from tests.tutorials import coming_from
from tests.tutorials.tutorial_page import blocks

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))
CONVERTED: dict[str, Callable[[Path], list[Sample]]] = {
    "energon": coming_from.energon,
    "ray-data": coming_from.ray_data,
    "tf-data-service": coming_from.tf_data_service,
    "webdataset": coming_from.webdataset,
}


def python_of(page: str, word: str) -> str:
    """The one block of Python of a page with this word in it."""
    path = next(path for path in PAGES if path.stem == page)
    [found] = [block.text for block in blocks(path) if block.language == "python" and word in block.text]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", CONVERTED)
def test_a_conversion_gives_what_the_data_had(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = CONVERTED[page](tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(page, "# convert.py"), "convert.py", "exec"), {"__name__": "__main__"})

    samples = list(samples_of(parse_spec({"name": "converted", "sources": [{"path": str(tmp_path / "converted")}]})))

    assert sorted(as_lines([plain_of(sample, expected) for sample in samples])) == sorted(as_lines(expected))


@pytest.mark.slow
def test_streams_become_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coming_from.streaming(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of("streaming", "# convert.py"), "convert.py", "exec"), {"__name__": "__main__"})

    job = load_spec_yaml(tmp_path / "job.yaml")

    assert [(source.name, source.weight) for source in job.sources] == [("photos", 0.75), ("more", 0.25)]
    samples = list(samples_of(job))
    assert len(samples) == 2 * len(list(samples_of(parse_spec({"name": "one", "sources": [{"path": job.sources[0].path}]}))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_python_is_python(page: Path) -> None:
    code = [block.text for block in blocks(page) if block.language == "python"]
    assert len(code) == 3
    for text in code:
        ast.parse(text)


@pytest.mark.slow
@pytest.mark.integration
def test_the_loops_train() -> None:
    """Of each page the loop after the change, with a model that does nothing."""
    with trainer.local(example_data() / "charts-00000.tar", global_batch=8, steps=2) as local, Jobs(local.endpoint) as jobs:
        for page in PAGES:
            spec: dict[str, Any] = {**jobs.spec(local.job).model_dump(), "name": page.stem}
            jobs.submit(parse_spec(spec))
            seen: list[Any] = []
            names = {"train_microbatch": seen.append, "update": lambda: None, "rank": 0, "num_ranks": 1}
            loop = re.sub(r'job="[\w-]+"', f'job="{page.stem}"', python_of(page.stem, "trainer.connect"))
            exec(compile(loop.replace("127.0.0.1:7070", local.endpoint), str(page), "exec"), names)
            assert jobs.show(page.stem).state == "done"
            assert len(seen) > 1
