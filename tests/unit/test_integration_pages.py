"""The pages of docs/integrations say what the loops of examples/integrations do, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
LOOPS = [page for page in PAGES if page.stem != "dynamic-batches"]


@pytest.mark.parametrize("page", LOOPS, ids=lambda page: page.stem)
def test_every_line_of_a_page_s_loop_is_one_of_its_example(page: Path) -> None:
    text = page.read_text()
    example = (ROOT / "examples" / "integrations" / f"{page.stem}_loop.py").read_text()
    lines = {line.strip() for line in example.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", text.partition("\nAfter")[2], re.DOTALL)
    assert blocks
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in lines] == []
    [command] = re.findall(r"^    ((?:python|torchrun) .*)$", text, re.MULTILINE)
    assert f"examples/integrations/{page.stem}_loop.py" in command


def test_the_loops_options_fit_their_job_by_default() -> None:
    job = yaml.safe_load((ROOT / "examples" / "integrations" / "job.yaml").read_text())
    said = (ROOT / "examples" / "integrations" / "settings.py").read_text()
    defaults = {name: int(value) for name, value in re.findall(r'"--(steps|microbatches)", type=int, default=(\d+)', said)}
    assert defaults == {"steps": job["steps"], "microbatches": job["topology"]["microbatches"]}
    assert job["topology"]["replicas"] == 1
    assert (ROOT / job["sources"][0]["path"]).exists()
    for page in LOOPS:
        text = page.read_text()
        assert "\n    headrace job submit examples/integrations/job.yaml\n" in text, page
        assert f"--job {job['name']} " in text, page


def test_every_page_is_linked() -> None:
    for linking in ("README.md", "docs/loader.md"):
        text = (ROOT / linking).read_text()
        assert [page.name for page in PAGES if f"integrations/{page.name}" not in text] == []
