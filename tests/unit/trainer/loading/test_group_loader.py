"""Four processes that train on the same samples, over gloo: one is connected, and all get what it gets, errors included."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from headrace import trainer
from headrace.quarantine import Reason, Rejected
from tests.unit.proto.transport import payload_world
from tests.unit.trainer.loading import group_worker, loader_world

NUM_PROCESSES = 4
ALIKE = [{} for _ in range(NUM_PROCESSES)]
CP_PP = [{"cp": [rank % 2, 2], "pp": [rank // 2, 2], "pad_to": 3} for rank in range(NUM_PROCESSES)]
TOTALS = {"num_targets": 40, "target_weight": 12.5, "max_tokens": 7, "most_microbatches": 3}

World = loader_world.World
Results = list[dict[str, Any]]


def two_steps(world: World) -> None:
    world.hold("0/1", "0/2", "0/3", "1/1")
    tickets = ["0/1", "0/2", "0/3", "1/1"]
    world.tell(world.plan(0, ["0/1", "0/2"], ["0/3"]), world.plan(1, ["1/1"], []), *map(world.place, tickets))
    world.end()


def many_microbatches(world: World) -> None:
    tickets = [f"0/{number}" for number in range(1, 9)]
    world.hold(*tickets)
    world.tell(world.plan(0, *([ticket] for ticket in tickets)), *map(world.place, tickets))
    world.end()


def damaged(world: World) -> None:
    """One of two samples."""
    rejected = Rejected(name="s/0/9", reason=Reason.CORRUPT_MEDIA, detail="cut", sample_id=9, row=0)
    world.hold("0/1")
    world.producer.add_stuck("0/9")
    world.producer.finish("0/9", loader_world.make_part(9).slice(0, 0), rejected=(rejected,))
    world.tell(world.plan(0, ["0/1", "0/9"]), *map(world.place, ["0/1", "0/9"]))
    world.end()


def fails(world: World) -> None:
    world.step(0)
    world.end("the data set is gone")


def three_steps(world: World) -> None:
    for index in range(3):
        world.step(index)
    world.end()


def media_in_their_places(world: World) -> None:
    for number in (1, 2, 3):
        world.producer.add(f"0/{number}", loader_world.make_part(number, placeholders=(1, 2)), step=0)
    tickets = ["0/1", "0/2", "0/3"]
    world.tell(world.plan(0, tickets[:2], tickets[2:]), *map(world.place, tickets))
    world.end()


SCENARIOS: dict[str, tuple[Callable[[World], None], dict[str, Any]]] = {
    "alike": (two_steps, {"parallel": ALIKE}),
    "long": (many_microbatches, {"parallel": ALIKE}),
    "broadcast": (two_steps, {"parallel": ALIKE, "folder": "/proc"}),
    "no room": (two_steps, {"parallel": ALIKE, "share": 1 << 60}),
    "sliced": (two_steps, {"parallel": CP_PP}),
    "sliced and broadcast": (two_steps, {"parallel": CP_PP, "folder": "/proc"}),
    "equal": (two_steps, {"parallel": ALIKE, "options": {"equal_microbatches": True}}),
    "damaged": (damaged, {"parallel": ALIKE}),
    "fails": (fails, {"parallel": ALIKE}),
    "waits": (two_steps, {"parallel": ALIKE, "beat_s": 0.0005}),
    "resumes": (three_steps, {"parallel": CP_PP, "resume": [2, 2, 2, 2], "opens_before": True}),
    "resumes apart": (three_steps, {"parallel": ALIKE, "resume": [2, 2, 1, 2]}),
    "of two data-parallel ranks": (three_steps, {"parallel": [{"dp_rank": rank % 2, "dp_size": 2} for rank in range(4)]}),
    "commits too soon": (three_steps, {"parallel": ALIKE, "leaves_behind": 1}),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    with ExitStack() as stack:
        worlds = {}
        for name, (tell, _) in SCENARIOS.items():
            worlds[name] = World(payload_world.Producer(16 << 20, shared=False))
            stack.callback(worlds[name].stop)
            worlds[name].totals = TOTALS
            tell(worlds[name])
        yield worlds


@pytest.fixture(scope="module")
def results(worlds: dict[str, World], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What each process got, by scenario."""
    settings = {name: scenario for name, (_, scenario) in SCENARIOS.items()}
    return results_of(settings, worlds, tmp_path_factory.mktemp("group"))


def results_of(settings: dict[str, dict[str, Any]], worlds: dict[str, World], folder: Path) -> dict[str, Results]:
    scenarios = {name: scenario | {"endpoint": worlds[name].endpoint} for name, scenario in settings.items()}
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    mp.start_processes(group_worker.main, args=(NUM_PROCESSES, folder), nprocs=NUM_PROCESSES, start_method="forkserver")
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_PROCESSES)]
    return {name: [of_rank[name] for of_rank in of_ranks] for name in settings}


def microbatches(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [microbatch for step in result["steps"] for microbatch in step["microbatches"]]


def test_all_processes_get_the_same_and_one_commits(results: dict[str, Results], worlds: dict[str, World]) -> None:
    got = results["alike"]
    assert [one["error"] for one in got] == [""] * NUM_PROCESSES
    assert [[m["sample_ids"] for m in microbatches(one)] for one in got] == [[[1, 2], [3], [101], []]] * NUM_PROCESSES
    for one in got[1:]:
        assert microbatches(one) == microbatches(got[0])
        assert one["state"] == got[0]["state"]
    assert [step["num_targets"] for step in got[3]["steps"]] == [40, 40]
    assert [step["target_weight"] for step in got[3]["steps"]] == [12.5, 12.5]
    assert worlds["alike"].commits == [0, 1]
    assert worlds["alike"].opens == 1, "one process is connected"


def test_on_one_host_no_payload_is_sent(results: dict[str, Results]) -> None:
    """Headers and layouts are, which are small: the processes read the same memory, of which no name is left."""
    for step in results["alike"][1]["steps"]:
        assert step["received_bytes"] <= 1024 * step["count"]
    assert not list(Path("/dev/shm").glob("headrace-group-*"))


def test_what_is_read_in_place_stays_until_the_step_is_committed(results: dict[str, Results]) -> None:
    got = results["long"]
    assert [one["error"] for one in got] == [""] * NUM_PROCESSES
    assert [len(microbatches(one)) for one in got] == [8] * NUM_PROCESSES
    assert all(step["unchanged"] for one in got for step in one["steps"])


@pytest.mark.parametrize("scenario", ["broadcast", "no room"])
def test_without_memory_in_common_each_byte_is_moved_once(results: dict[str, Results], scenario: str) -> None:
    for step in results[scenario][1]["steps"]:
        payload = sum(microbatch["payload_bytes"] for microbatch in step["microbatches"])
        assert payload <= step["received_bytes"] <= payload + 1024 * step["count"]


@pytest.mark.parametrize(("one", "other"), [("alike", "broadcast"), ("alike", "no room"), ("sliced", "sliced and broadcast")])
def test_it_is_the_same_by_whichever_way_it_comes(results: dict[str, Results], one: str, other: str) -> None:
    assert list(map(microbatches, results[one])) == list(map(microbatches, results[other]))


def test_what_is_sent_is_what_came(results: dict[str, Results]) -> None:
    first, *_ = microbatches(results["alike"][2])
    assert first["patches"] == [[value] * 588 for value in (1, 1, 1, 1, 2, 2, 2, 2)]
    assert first["mel"] == [[float(value)] * 128 for value in (1, 1, 1, 2, 2, 2)]
    assert (first["image_grids"], first["mel_frames"]) == ([[1, 2, 2]] * 2, [3, 3])
    assert first["target_weights"] == [1 / 8, 0, 2 / 8, 0]
    assert first["sources"] == [0, 0]


def test_context_parallel_ranks_get_their_rows_and_later_stages_no_media(results: dict[str, Results]) -> None:
    got = results["sliced"]
    assert [one["error"] for one in got] == [""] * NUM_PROCESSES
    for number in range(4):
        of_ranks = [microbatches(one)[number] for one in got]
        num_tokens = of_ranks[0]["cu_seqlens"][-1]
        for stage in (of_ranks[:2], of_ranks[2:]):
            assert sorted(row for one in stage for row in one["rows"]) == list(range(num_tokens))
            assert [len(one["input_ids"]) for one in stage] == [num_tokens // 2] * 2
            assert sum(one["num_targets"] for one in stage) == len(of_ranks[0]["sample_ids"])
            assert sum(sum(one["target_weights"]) for one in stage) == sum(of_ranks[0]["sample_ids"]) / 8
            assert all(len(one["input_ids"]) % 3 == 0 for one in stage)
        for name in ("input_ids", "labels", "target_weights", "position_ids", "rows"):
            assert [one[name] for one in of_ranks[:2]] == [one[name] for one in of_ranks[2:]]
        assert [len(one["patches"]) for one in of_ranks] == [4 * len(of_ranks[0]["sample_ids"])] * 2 + [0, 0]
        assert all(one["image_grids"] == of_ranks[0]["image_grids"] for one in of_ranks)


def test_fillers_come_to_all(results: dict[str, Results]) -> None:
    for one in results["equal"]:
        assert [step["count"] for step in one["steps"]] == [3, 3]
        assert [microbatch["filler"] for microbatch in microbatches(one)] == [False, False, True] * 2


def test_a_damaged_sample_is_known_to_all(results: dict[str, Results]) -> None:
    for one in results["damaged"]:
        assert [step["rejected"] for step in one["steps"]] == [[9]]
        assert [m["sample_ids"] for m in microbatches(one)] == [[1]]
        assert one["steps"][0]["num_targets"] == 40


def test_all_processes_hear_that_the_job_failed(results: dict[str, Results]) -> None:
    assert [one["error"] for one in results["fails"]] == ["JobFailedError: the data set is gone"] * NUM_PROCESSES


def test_however_long_one_waits_the_others_are_told_so(results: dict[str, Results]) -> None:
    """Said 2,000 times a second, in place of every five seconds."""
    for one, quiet in zip(results["waits"], results["alike"], strict=True):
        assert microbatches(one) == microbatches(quiet)


def test_all_processes_resume_at_the_step_that_they_load(results: dict[str, Results], worlds: dict[str, World]) -> None:
    for one in results["resumes"]:
        assert one["first"] == 2
        assert [step["index"] for step in one["steps"]] == [2]
        assert one["state"]["step"] == 3
    assert worlds["resumes"].opens == 2, "the loader was open before"
    assert worlds["resumes"].commits == [0, 1, 2], "the first two, which the store of this world lacks, are committed again"


def test_processes_that_load_different_steps_are_refused_in_all(results: dict[str, Results]) -> None:
    (error,) = {one["error"] for one in results["resumes apart"]}
    assert error.startswith("ConflictError: processes of data-parallel rank 0 resume from different steps (2, 2, 1, 2)")


def test_a_group_of_two_data_parallel_ranks_is_refused_in_all(results: dict[str, Results]) -> None:
    (error,) = {one["error"] for one in results["of two data-parallel ranks"]}
    assert error.startswith("UserError: processes of one group have dp_rank 0 and 1")


def test_a_step_that_was_not_consumed_is_not_committed(results: dict[str, Results], worlds: dict[str, World]) -> None:
    (error,) = {one["error"] for one in results["commits too soon"]}
    assert error.startswith("ConflictError: step 0 cannot be committed")
    assert worlds["commits too soon"].commits == []


@pytest.mark.slow
def test_balanced_slices_are_the_whole_and_have_its_mask(tmp_path: Path) -> None:
    """In the second job no placeholder stands for the media, of which each process hears."""
    makers = {"balanced": media_in_their_places, "maskless": two_steps}
    parallel = [{"cp": [rank, NUM_PROCESSES], "cp_order": "balanced"} for rank in range(NUM_PROCESSES)]
    worlds = {name: World(payload_world.Producer(16 << 20, shared=False)) for name in makers}
    try:
        for name, tell in makers.items():
            worlds[name].totals = TOTALS
            tell(worlds[name])
        got = results_of({name: {"parallel": parallel} for name in makers}, worlds, tmp_path)
    finally:
        for world in worlds.values():
            world.stop()
    assert [one["error"] for one in got["balanced"]] == [""] * NUM_PROCESSES
    for of_ranks in zip(*map(microbatches, got["balanced"]), strict=True):
        num_tokens = of_ranks[0]["cu_seqlens"][-1]
        assert sorted(row for one in of_ranks for row in one["rows"]) == list(range(num_tokens))
        assert [len(one["input_ids"]) for one in of_ranks] == [128] * NUM_PROCESSES
        joined = {row: value for one in of_ranks for row, value in zip(one["rows"], one["input_ids"], strict=True)}
        num_samples = len(of_ranks[0]["sample_ids"])
        assert [joined[row] for row in range(4 * num_samples)] == [1, 2, 5, 6] * num_samples
        assert sum(one["num_targets"] for one in of_ranks) == num_samples
        assert {tuple(one["mask_fields"]) for one in of_ranks} == {tuple(of_ranks[0]["mask_fields"])}
        assert sum(field != 0 for field in of_ranks[0]["mask_fields"]) == 4 * num_samples
    for one in got["maskless"]:
        assert one["error"].startswith("UserError: a microbatch has no attention mask: 0 tokens have the id 1")


def test_a_process_alone_may_have_its_microbatches_padded() -> None:
    world = World(payload_world.Producer(16 << 20, shared=False))
    world.totals = TOTALS
    two_steps(world)
    try:
        with trainer.connect(world.endpoint, job="job", parallel=trainer.Parallel(pad_to=8)) as loader:
            for step in loader:
                assert [len(microbatch.data.input_ids) % 8 for microbatch in step] == [0, 0]
                loader.commit(step)
            assert loader.statistics().num_parts == {"flight": 4}
    finally:
        world.stop()
    assert world.commits == [0, 1]
