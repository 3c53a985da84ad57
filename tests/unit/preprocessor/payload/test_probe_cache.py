"""What probing came by is kept until decoding: once, the latest, and within a budget."""

from __future__ import annotations

from headrace.preprocessor.payload.probe_cache import ProbeCache
from headrace.sample import SampleRef

ROOMY = 1 << 20


def ref(row: int, sample_id: int = 0) -> SampleRef:
    return SampleRef(sample_id=sample_id, shard=3, row=row)


def test_a_value_is_given_once() -> None:
    probed = ProbeCache[str](ROOMY)
    probed.put("job", ref(0), "first", 5)
    assert probed.take("job", ref(0)) == "first"
    assert probed.take("job", ref(0)) is None


def test_a_sample_is_known_by_its_place_whatever_its_number_in_the_epoch() -> None:
    probed = ProbeCache[str](ROOMY)
    probed.put("job", ref(0, sample_id=7), "first", 5)
    assert probed.take("job", ref(1, sample_id=7)) is None
    assert probed.take("other", ref(0, sample_id=7)) is None
    assert probed.take("job", ref(0, sample_id=8)) == "first"


def test_the_oldest_make_room() -> None:
    probed = ProbeCache[str](3 * (8000 + 1024))
    for row in range(4):
        probed.put("job", ref(row), "some", 8000)
    assert [probed.take("job", ref(row)) is not None for row in range(4)] == [False, True, True, True]


def test_what_is_put_again_counts_once() -> None:
    probed = ProbeCache[str](2 * (8000 + 1024))
    for _ in range(5):
        probed.put("job", ref(0), "some", 8000)
    probed.put("job", ref(1), "some", 8000)
    assert probed.take("job", ref(0)) is not None
    assert probed.take("job", ref(1)) is not None


def test_what_has_no_room_at_all_is_not_kept() -> None:
    probed = ProbeCache[str](1000)
    probed.put("job", ref(0), "large", 10_000)
    assert probed.take("job", ref(0)) is None


def test_of_a_job_that_is_over_nothing_is_left_and_nothing_counts() -> None:
    probed = ProbeCache[str](2 * (8000 + 1024))
    for job in ("over", "stays"):
        probed.put(job, ref(0), job, 8000)
    probed.forget("over")
    probed.put("stays", ref(1), "more", 8000)
    assert probed.take("over", ref(0)) is None
    assert [probed.take("stays", ref(row)) for row in range(2)] == ["stays", "more"]
