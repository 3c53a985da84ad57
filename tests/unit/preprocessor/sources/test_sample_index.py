"""The index of an archive's samples gives back what was put in, in little memory."""

from __future__ import annotations

import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.sources.sample_index import SampleIndex, Span

spans = st.builds(lambda offset, size: Span(offset=offset, size=size), st.integers(0, 2**63), st.integers(0, 2**63))
names = st.text(max_size=6) | st.just("\udcff")
samples = st.lists(st.tuples(names, st.dictionaries(names, spans, max_size=4)), max_size=8)


@given(samples)
def test_it_gives_back_what_was_put_in(given_: list[tuple[str, dict[str, Span]]]) -> None:
    index = SampleIndex(given_)
    assert [(index.key(row), index.spans(row)) for row in range(len(index))] == given_
    assert [list(index.spans(row)) for row in range(len(index))] == [list(spans) for _, spans in given_]
    with pytest.raises(IndexError):
        index.key(len(index))


def test_a_sample_of_three_members_takes_at_most_100_bytes() -> None:
    members = {extension: Span(offset=2**40, size=2**20) for extension in ("jpg", "json", "txt")}
    tracemalloc.start()
    index = SampleIndex((f"{number:09}", members) for number in range(20_000))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sys.getsizeof(index) <= taken <= 100 * len(index)
