"""The step loader: order, bounds, and what it survives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import trainer
from headrace.errors import ConflictError, JobFailedError, SupersededError, UnavailableError, UserError
from headrace.sample import UNIT_COLUMNS
from headrace.trainer import Microbatch, Step, StepLoader
from headrace.trainer.loading.collate import collate
from headrace.trainer.loading.steps import sources_in
from headrace.trainer.train import train
from headrace.v1 import sessions_pb2
from tests.unit.proto.transport import payload_world
from tests.unit.trainer.loading import loader_world


@pytest.fixture
def world() -> Iterator[Any]:
    """Its preprocessor shares no memory: parts come over the network."""
    world = loader_world.World(payload_world.Producer(16 << 20, shared=False))
    yield world
    world.stop()


@pytest.fixture
def shared_world() -> Iterator[Any]:
    """Parts come through shared memory."""
    world = loader_world.World(payload_world.Producer(16 << 20))
    yield world
    world.stop()


def connect(world: Any, **options: Any) -> StepLoader:
    return trainer.connect(world.endpoint, job="job", **options)


def read(step: Step) -> list[int]:
    return [i for microbatch in step for i in microbatch.data.sample_ids.tolist()]


def test_what_the_job_says_is_known_once_the_loader_is_open(world: Any) -> None:
    loader = connect(world)
    for name in ("spec", "vocabulary"):
        with pytest.raises(AttributeError, match=rf"loader\.{name} .* inside of `with loader:`, or call loader\.open\(\) before"):
            getattr(loader, name)
    with pytest.raises(AttributeError, match="has no attribute 'specs'"):
        getattr(loader, "specs")  # noqa: B009
    with loader:
        assert loader.spec.name == "job"


def test_a_job_that_is_over_says_why_there_is_no_step(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    world.end()
    with connect(world) as loader:
        assert list(loader) == []
    assert (
        "no step is left of the job, which `headrace job reset NAME --step 0` begins anew job=job committed=0" in caplog.messages
    )


def test_steps_come_in_order_though_their_plans_do_not(world: Any) -> None:
    for index in (1, 0, 2):
        world.step(index)
    world.end()
    with connect(world) as loader:
        seen = []
        for step in loader:
            seen.append((step.index, read(step)))
            loader.commit(step)
    assert seen == [(0, [0, 1]), (1, [100, 101]), (2, [200, 201])]
    assert world.commits == [0, 1, 2]


def test_a_microbatch_of_several_parts_is_packed_in_their_order(world: Any) -> None:
    world.tell(world.plan(0, ["0/3", "0/1"], [], ["0/2"]), *map(world.place, ["0/1", "0/2", "0/3"]))
    world.hold("0/1", "0/2", "0/3")
    with connect(world) as loader:
        step = next(iter(loader))
        assert [microbatch.data.sample_ids.tolist() for microbatch in step] == [[3, 1], [], [2]]
        assert step.num_samples == 9


def test_a_microbatch_of_which_one_part_has_samples_is_shown_where_that_lies(shared_world: Any) -> None:
    """The other one's were all damaged."""
    world = shared_world
    world.producer.add("0/0", loader_world.make_part(0).slice(0, 0))
    world.hold("0/1")
    world.tell(world.plan(0, ["0/0", "0/1"]), *map(world.place, ["0/0", "0/1"]))
    with connect(world) as loader:
        (microbatch,) = next(iter(loader))
        assert microbatch.data.sample_ids.tolist() == [1]
        assert loader.statistics().held_bytes > 0


def test_a_microbatch_says_which_of_its_samples_share_a_pack(world: Any) -> None:
    """Of one pack a sample was damaged, of another one all."""
    event = world.plan(0, ["0/1", "0/4", "0/2", "0/7"], ["0/3"])
    packs = [sessions_pb2.Pack(sample_ids=samples) for samples in ([1, 8, 4], [9], [2, 7])]
    event.plan.microbatches[0].packs.extend(packs)
    tickets = ["0/1", "0/4", "0/2", "0/7", "0/3"]
    world.hold(*tickets)
    world.tell(event, *map(world.place, tickets))
    with connect(world) as loader:
        packed, alone = (microbatch.data for microbatch in next(iter(loader)))
    assert packed.sample_ids.tolist() == [1, 4, 2, 7]
    assert packed.cu_seqlens.tolist() == [0, 2, 4, 6, 8]
    assert packed.pack_offsets.tolist() == [0, 4, 8]
    assert alone.pack_offsets.tolist() == [0, 2]


@pytest.mark.parametrize("bound", [1, 3])
def test_no_more_parts_than_asked_for_lie_ready_beside_the_microbatch_that_is_packed_next(world: Any, bound: int) -> None:
    world.step(0, 12)
    world.step(1, 12)
    with connect(world, prefetch_parts=bound, threads=8) as loader:
        for read_so_far, _ in enumerate(next(iter(loader)), 1):
            expected = min(24, read_so_far + 1 + bound)
            world.wait(lambda expected=expected: len(world.fetched) >= expected)
            assert len(world.fetched) == expected


def test_parts_that_lie_ready_are_bounded_in_bytes(world: Any) -> None:
    world.step(0, 12)
    with connect(world, prefetch_parts=99, prefetch_bytes=0) as loader:
        for read_so_far, _ in enumerate(next(iter(loader)), 1):
            assert len(world.fetched) == read_so_far


def test_a_part_that_is_not_where_it_should_be_is_reported_and_fetched_where_it_is_then(world: Any) -> None:
    world.withheld = {"0/1"}
    world.step(0)
    with connect(world) as loader:
        microbatches = iter(next(iter(loader)))
        next(microbatches)
        world.wait(lambda: world.lost)
        assert world.lost == [("0/1", "lease-1")]
        world.hold("0/1")
        world.tell(world.place("0/1", "lease-2"))
        assert next(microbatches).data.sample_ids.tolist() == [1]


def test_a_part_whose_loss_cannot_be_reported_is_tried_again_at_the_same_place(world: Any) -> None:
    world.withheld, world.deaf = {"0/0"}, True
    world.step(0)
    with connect(world) as loader:
        reading = threading.Thread(target=lambda: read(next(iter(loader))))
        reading.start()
        world.wait(lambda: len(world.lost) >= 2)
        world.hold("0/0")
        reading.join(timeout=10)
        assert not reading.is_alive()


def test_a_restart_of_the_service_is_survived_by_listener_and_commit_with_one_new_session(world: Any) -> None:
    world.step(0)
    with connect(world) as loader:
        steps = iter(loader)
        step = next(steps)
        read(step)
        world.forget_sessions()
        loader.commit(step)
        assert set(world.commits) == {0}
        world.step(1)
        assert read(next(steps)) == [100, 101]
    assert world.opens == 2


def test_a_commit_whose_sessions_are_all_unknown_gives_up_in_time_with_a_sentence(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an endpoint leads to services that do not share a store."""
    monkeypatch.setattr("headrace.trainer.loading.session.AWAY_TIMEOUT_S", 2.0)
    monkeypatch.setattr("headrace.trainer.loading.session.RETRY_S", 0.0)
    world.step(0)
    with connect(world) as loader:
        step = next(iter(loader))
        read(step)
        world.forgetful = True
        with pytest.raises(UnavailableError, match=r"for 2 s .* knew none of the sessions that it opened for rank 0"):
            loader.commit(step)
        assert world.opens > 2
        assert not world.commits
        world.forgetful = False
        loader.commit(step)
    assert world.commits


def test_ranks_that_lose_the_service_together_spread_their_calls_by_their_number(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[tuple[float, int]] = []

    def pause_s(pause_s: float, num_clients: int, draw: float) -> float:
        pauses.append((pause_s, num_clients))
        assert 0 <= draw < 1
        return 0.0

    monkeypatch.setattr("headrace.trainer.loading.session.retry_pause_s", pause_s)
    world.step(0)
    with connect(world, rank=0, num_ranks=2) as loader:
        step = next(iter(loader))
        read(step)
        world.forget_sessions()
        loader.commit(step)
    assert (0.0, 2) in pauses


def test_a_commit_returns_when_the_other_ranks_have_committed_too_also_over_a_restart(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.complete = False
    world.step(0)
    caplog.set_level(logging.INFO, "headrace.trainer.loading.session")
    with connect(world, rank=0, num_ranks=2) as loader:
        step = next(iter(loader))
        read(step)
        committing = threading.Thread(target=loader.commit, args=(step,))
        committing.start()
        world.wait(lambda: len(world.commits) >= 2)  # it asks again
        world.forget_sessions()
        so_far = len(world.commits)
        world.wait(lambda: len(world.commits) > so_far)
        assert committing.is_alive()
        assert loader.state_dict()["step"] == 0
        assert caplog.text.count("waiting for other ranks to commit job=job step=0 missing=1") == 1
        world.complete = True
        committing.join(10)
        assert loader.state_dict()["step"] == 1


def test_a_rank_that_another_process_took_over_stops(world: Any) -> None:
    world.step(0)
    with connect(world) as loader:
        steps = iter(loader)
        step = next(steps)
        read(step)
        with connect(world), pytest.raises(SupersededError):
            loader.commit(step)
        with pytest.raises(SupersededError):
            next(steps)


def test_a_job_that_fails_stops_the_loop_with_its_sentence(world: Any) -> None:
    world.end("no data set at /d")
    with connect(world) as loader, pytest.raises(JobFailedError, match="no data set at /d"):
        next(iter(loader))


def test_a_loop_that_was_left_goes_on_behind_the_step_it_had(world: Any) -> None:
    for index in range(3):
        world.step(index)
    world.end()
    with connect(world) as loader:
        seen = []
        for _ in range(2):
            for step in loader:
                read(step)
                loader.commit(step)
                seen.append(step.index)
                if step.index == 1:
                    break
    assert seen == [0, 1, 2]


def test_a_step_is_committed_after_it_was_read_and_may_be_twice(world: Any) -> None:
    world.step(0)
    with connect(world) as loader:
        step = next(iter(loader))
        microbatches = iter(step)
        next(microbatches)
        with pytest.raises(ConflictError, match="step 0"):
            loader.commit(step)
        next(microbatches)
        loader.commit(step)
        loader.commit(step)
        assert loader.state_dict()["step"] == 1


def test_steps_that_are_never_committed_are_told_of(world: Any) -> None:
    for index in range(4):
        world.step(index)
    with connect(world) as loader:
        steps = iter(loader)
        for _ in range(4):
            read(next(steps))
        with pytest.raises(ConflictError, match=r"call loader\.commit"):
            next(steps)


def test_closing_does_not_wait_for_a_service_that_is_gone(world: Any) -> None:
    world.step(0)
    loader = connect(world).open()
    world.stop()
    began_s = time.monotonic()
    loader.close()
    assert time.monotonic() - began_s < 5
    assert loader._thread is not None
    loader._thread.join(timeout=5)
    assert not loader._thread.is_alive()


def test_a_state_of_another_job_is_refused(world: Any) -> None:
    loader = connect(world)
    with pytest.raises(ConflictError, match="'other'"):
        loader.load_state_dict({"version": 1, "job": "other", "step": 0})
    loader.close()


def test_a_fault_that_nobody_foresaw_stops_the_loop_too(world: Any) -> None:
    def full_disk(_: logging.LogRecord) -> bool:
        raise OSError("no space left")

    log = logging.getLogger("headrace.trainer.loading.loader")
    log.addFilter(full_disk)
    try:
        with connect(world) as loader:
            world.forget_sessions()
            with pytest.raises(OSError, match="no space left"):
                next(iter(loader))
    finally:
        log.removeFilter(full_disk)


@pytest.mark.parametrize("fresh_weights", [False, True])
def test_training_goes_on_with_fresh_weights_only_where_that_is_asked_for(
    world: Any, fresh_weights: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world.next_step = 3
    world.tell(world.plan(3, []))
    world.end()
    if fresh_weights:
        train(world.endpoint, job="job", model_name="tiny", fresh_weights=True)
        assert "weights are fresh, and the job goes on job=job from_step=3" in caplog.text
    else:
        with pytest.raises(
            UserError, match=r"committed 3 step\(s\), which fresh weights have not seen: .*, or take --fresh-weights"
        ):
            train(world.endpoint, job="job", model_name="tiny")
        assert not world.commits


def test_a_job_that_is_done_trains_nothing_and_says_how_to_begin_anew(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    world.next_step = 3
    world.end()
    train(world.endpoint, job="job", model_name="tiny")
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("no step is left of the job, which `headrace job reset NAME --step 0` begins anew")


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"unit": "pixels"}, "unit 'pixels' must be one of encoder, vision, audio, llm, generator, or None"),
        ({"hedge_s": 0}, "hedge_s is 0, but must be above 0"),
        ({"transports": ("udp",)}, "must be some of"),
    ],
)
def test_an_option_that_is_none_is_refused_before_anything_is_opened(option: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        trainer.connect("127.0.0.1:1", job="job", **option)


def tensors(loader: StepLoader) -> list[dict[str, torch.Tensor]]:
    """Of every microbatch of the first step."""
    step = next(iter(loader))
    return [{name: getattr(m.data, name) for name in m.data.__slots__ if name != "num_targets"} for m in step]


@pytest.mark.parametrize("unit", UNIT_COLUMNS)
def test_a_rank_receives_its_unit_s_columns_only(world: Any, unit: str) -> None:
    """In microbatches of one part and of two. Patches are 2352 bytes a sample, mel is 768."""
    world.hold("0/1", "0/2", "0/3")
    world.tell(world.plan(0, ["0/1"], ["0/2", "0/3"]), *map(world.place, ["0/1", "0/2", "0/3"]))
    with connect(world) as loader:
        full = tensors(loader)
        full_bytes = loader.statistics().received_bytes
    with connect(world, unit=unit) as loader:
        own = tensors(loader)
        own_bytes = loader.statistics().received_bytes
    left_out = 3 * (2352 * ("patches" not in UNIT_COLUMNS[unit]) + 768 * ("mel" not in UNIT_COLUMNS[unit]))
    assert full_bytes > 3 * (2352 + 768)
    assert own_bytes <= full_bytes - left_out
    for actual, expected in zip(own, full, strict=True):
        there = {name for name in UNIT_COLUMNS[unit] if name in expected} | {"sample_ids"}
        assert all(torch.equal(actual[name], expected[name]) for name in there)
        assert all(actual[name].numel() == 0 for name in {"input_ids", "labels", "patches", "mel"} - there)
        assert all(actual[name].shape[1:] == expected[name].shape[1:] for name in expected), "as wide as ever"


def test_the_loader_tells_how_it_has_fared(world: Any) -> None:
    for index in range(2):
        world.step(index, 3)
    world.end()
    with connect(world) as loader:
        for step in loader:
            for _ in step:
                assert loader.statistics().held_bytes > 0
            loader.commit(step)
        statistics = loader.statistics()
    assert statistics.num_parts == {"flight": 6}
    assert statistics.received_bytes > 6 * (2352 + 768)
    assert (statistics.ready_bytes, statistics.held_bytes, statistics.num_pending) == (0, 0, 0)
    assert (statistics.num_hedged, statistics.num_fetched_again, statistics.num_late) == (0, 0, 0)
    assert statistics.data_wait_s > 0


def test_copied_microbatches_lie_in_memory_that_is_used_again(world: Any) -> None:
    for index in range(6):
        tickets = [f"{index}/{k}" for k in range(2)]
        world.hold(*tickets)
        world.tell(world.plan(index, tickets), *map(world.place, tickets))
    world.end()
    addresses = []
    with connect(world) as loader:
        for step in loader:
            for microbatch in step:
                assert microbatch.data.patches[:, 0].tolist() == [
                    n % 256 for n in microbatch.data.sample_ids.tolist() for _ in range(4)
                ]
                addresses.append(microbatch.data.patches.data_ptr())
            loader.commit(step)
        assert loader.statistics().idle_buffer_bytes > 0
    assert len(set(addresses)) <= 3, "one that the loop holds, one that is packed ahead, and one that is filled"


def test_a_rank_knows_of_its_step_before_the_first_microbatch(world: Any) -> None:
    """One of the samples turns out to be damaged: the step's targets are still those of the plan, which all ranks were told."""
    world.totals = {"num_targets": 40, "max_tokens": 7}
    world.producer.add("0/0", loader_world.make_part(0).slice(0, 0))
    world.hold("0/1")
    world.tell(world.plan(0, ["0/0"], ["0/1"]), *map(world.place, ["0/0", "0/1"]))
    with connect(world) as loader:
        step = next(iter(loader))
        assert (step.num_targets, step.max_tokens, step.num_microbatches) == (40, 7, 2)
        assert [microbatch.data.num_targets for microbatch in step] == [0, 1]
        assert step.num_targets == 40


def test_empty_microbatches_fill_up_a_rank_with_fewer_than_another_one(world: Any) -> None:
    world.totals = {"most_microbatches": 4}
    world.step(0)
    with connect(world, equal_microbatches=True) as loader:
        step = next(iter(loader))
        assert step.num_microbatches == 4
        microbatches = list(step)
        assert [microbatch.data.sample_ids.tolist() for microbatch in microbatches] == [[0], [1], [], []]
        assert [microbatch.is_filler for microbatch in microbatches] == [False, False, True, True]
        assert microbatches[-1].sources.tolist() == []
        assert sum(len(work.microbatches) for work in step.work()) == 2, "nobody plans by what fillers take"
        loader.commit(step)
    assert world.commits == [0]


def test_a_step_with_fillers_left_is_not_committed(world: Any) -> None:
    world.totals = {"most_microbatches": 3}
    world.step(0)
    with connect(world, equal_microbatches=True) as loader:
        step = next(iter(loader))
        microbatches = iter(step)
        for _ in range(2):
            next(microbatches)
        with pytest.raises(ConflictError, match="before all of its microbatches"):
            loader.commit(step)


def test_what_an_old_service_does_not_say_is_missed_only_where_it_is_asked_for(world: Any) -> None:
    world.step(0)
    with connect(world) as loader:
        step = next(iter(loader))
        assert step.num_microbatches == 2
        with pytest.raises(UserError, match="does not say the targets of a step: upgrade it"):
            _ = step.num_targets
        with pytest.raises(UserError, match="does not say the tokens of the largest microbatch"):
            _ = step.max_tokens
    with connect(world, equal_microbatches=True) as loader, pytest.raises(UserError, match="which equal_microbatches needs"):
        next(iter(loader))


def test_samples_of_a_job_with_one_source_are_of_that(world: Any) -> None:
    world.step(0, 1)
    with connect(world) as loader:
        (microbatch,) = next(iter(loader))
        assert microbatch.sources.tolist() == [0]


def test_sources_are_those_of_the_samples_that_arrived(world: Any) -> None:
    said = [sessions_pb2.SourceSamples(source=2, sample_ids=[5, 9]), sessions_pb2.SourceSamples(source=0, sample_ids=[7])]
    message = sessions_pb2.RankMicrobatch(sources=said)
    assert sources_in(message, torch.tensor([7, 9]), 3).tolist() == [0, 2]
    assert sources_in(sessions_pb2.RankMicrobatch(), torch.tensor([7]), 3) is None, "an old service does not say them"
    unknown = Microbatch(replica=0, index=0, data=collate([loader_world.make_part(7)]), _sources=None)
    with pytest.raises(UserError, match="does not say the sources of samples"):
        _ = unknown.sources
