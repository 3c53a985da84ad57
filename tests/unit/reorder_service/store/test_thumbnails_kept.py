"""Thumbnails of refused samples in the store: the latest of a job, by name."""

from __future__ import annotations

from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.store.progress import StepRecord
from headrace.reorder_service.store.refused_samples import KEPT_THUMBNAILS
from headrace.reorder_service.store.state import StateStore
from tests.small_jpeg import small_jpeg


def refused(name: str, thumbnail: bytes = b"", modality: str = "") -> Rejected:
    return Rejected(
        name=name, reason=Reason.CORRUPT_MEDIA, detail="cut", sample_id=1, row=2, modality=modality, thumbnail=thumbnail
    )


async def commit(store: StateStore, step: int, *items: Rejected) -> None:
    await store.commit_step("job", step, StepRecord(samples=(), loss=1.0, step_s=1.0, data_wait_s=0.0), items)


async def test_the_latest_are_kept_under_the_names_of_their_samples(store: StateStore) -> None:
    await store.create_job("job", "{}")
    await commit(store, 0, refused("s/a b", small_jpeg(1), "image"), refused("s/heard", modality="audio"), refused("s/none"))
    assert await store.thumbnails("job") == {"s/a b": small_jpeg(1)}
    found = {item.name: item.modality async for item in store.quarantine("job")}
    assert found == {"s/a b": "image", "s/heard": "audio", "s/none": ""}
    await commit(store, 1, *(refused(f"s/{number}", small_jpeg(number)) for number in range(KEPT_THUMBNAILS - 1)))
    assert len(await store.thumbnails("job")) == KEPT_THUMBNAILS
    await commit(store, 2, *(refused(f"s/late {number}", small_jpeg(number)) for number in range(3 * KEPT_THUMBNAILS)))
    kept = await store.thumbnails("job")
    assert list(kept) == [f"s/late {number}" for number in range(2 * KEPT_THUMBNAILS, 3 * KEPT_THUMBNAILS)]


async def test_a_sample_that_is_refused_again_shows_what_was_seen_last(store: StateStore) -> None:
    await store.create_job("job", "{}")
    await commit(store, 0, refused("s/a", small_jpeg(1)))
    await commit(store, 1, refused("s/a", small_jpeg(200)))
    assert await store.thumbnails("job") == {"s/a": small_jpeg(200)}


async def test_probes_that_wait_for_their_step_keep_them(store: StateStore) -> None:
    await store.create_job("job", "{}")
    await store.save_probes("job", 0, [], [refused("s/a", small_jpeg(1), "image")], [])
    loaded = await store.load_probes("job", 0)
    assert loaded is not None
    assert [(item.thumbnail, item.modality) for item in loaded[1]] == [(small_jpeg(1), "image")]
