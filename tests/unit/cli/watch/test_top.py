"""`headrace top`: its public JSON form, how it fits the terminal, and a service that goes away."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from headrace.cli.main import main
from headrace.cli.watch import top
from headrace.cli.watch.top_figures import figures
from headrace.cli.watch.top_table import picture
from headrace.errors import NotFoundError, UnavailableError
from headrace.jobs_client import JobsClient
from headrace.rates import Look
from headrace.v1 import jobs_pb2
from headrace.v1.common_pb2 import Occupancy
from headrace.v1.jobs_pb2 import JobStatus, PreprocessorStatus, RankStatus, SourceStatus
from headrace.v1.membership_pb2 import Node, Phase, Pipeline, PipelineStage, Recovered, Snapshot

MIB = 1 << 20
WAIT = "trainers wait 34% of their time for data: preprocessors decode as fast as they can"


def member(number: int, *, slow: bool = False) -> PreprocessorStatus:
    return PreprocessorStatus(
        preprocessor=f"worker-pool-7d9f-{number:06x}",
        endpoint=f"10.0.1.{number}:7071",
        samples_decoded=1000,
        bytes_decoded=500 * MIB,
        store_bytes=51 * MIB,
        store_budget_bytes=1024 * MIB,
        leases=34 if slow else 8,
        slots=34,
        occupancy=Occupancy(ordered=3, read=1, decoding=16, stored=12),
    )


def status(job: str = "charts", num_preprocessors: int = 1, num_ranks: int = 2, **fields: Any) -> JobStatus:
    running: dict[str, Any] = {
        "job": job,
        "state": jobs_pb2.JOB_STATE_RUNNING,
        "committed_steps": 41,
        "num_steps": 120,
        "committed_samples": 656,
        "quarantined_samples": 2,
        "data_wait_s": 3.4,
        "step_s": 10.0,
        "planned_steps": 4,
        "planned_bytes": 0,
        "spec_json": '{"window": 4, "window_bytes": null}',
        "preprocessors": [member(number, slow=number == 40) for number in range(num_preprocessors)],
        "ranks": [RankStatus(rank=n, committed_steps=41, data_wait_s=0.1, step_s=0.4) for n in range(num_ranks)],
        "sources": [
            SourceStatus(source="web", share=0.7, samples=452, tokens=9_000),
            SourceStatus(source="books", share=0.3, samples=204, tokens=3_000),
        ],
        "generation": 3,
        "leader": "10.0.0.1:7070",
        "term": 2,
        "up_s": 8040.0,
    }
    return JobStatus(**running | fields)


def shown(*statuses: JobStatus, width: int = 80, height: int | None = None, **options: Any) -> list[str]:
    """Its lines on a terminal."""
    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    seen = figures([[Look(at_s=0.0, status=item)] for item in statuses])
    console.print(picture(seen, width=width, height=height, **options))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("num_preprocessors", [1, 64])
def test_nothing_is_cut_off(width: int, num_preprocessors: int) -> None:
    lines = shown(status(num_preprocessors=num_preprocessors), width=width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    heads = "preprocessor samples/s MB/s leases ordered read decoding stored store"
    for words in (
        "10.0.0.1:7070 leads in term 2, for 2 h 14 min",
        "step 41/120",
        "generation 3",
        WAIT,
        "add preprocessors",
        heads,
    ):
        assert words in text
    assert "planned ahead 4 quarantined 2" in text
    assert ("51 of 1024 MiB" if width == 120 else "5%") in text


def test_of_many_preprocessors_the_busiest_are_shown_and_the_others_counted() -> None:
    lines = shown(status(num_preprocessors=64))
    rows = [line for line in lines if line.startswith("…")]
    assert len(rows) == 10
    assert rows[0].split()[0] == "…ool-7d9f-000028"
    assert lines[-1] == "and 54 more"


def test_of_many_ranks_the_late_ones_are_shown_and_then_those_that_wait() -> None:
    ranks = [RankStatus(rank=n, committed_steps=41, data_wait_s=0.4 if n == 50 else 0.1, step_s=0.8) for n in range(64)]
    ranks[33].committed_steps = 40
    lines = shown(status(ranks=ranks))
    start = next(i for i, line in enumerate(lines) if "next step" in line)
    assert [line.split()[-5:] for line in lines[start + 1 : start + 3]] == [
        ["33", "40", "100", "ms", "12%"],
        ["50", "41", "400", "ms", "50%"],
    ]
    assert lines[start + 11].strip() == "and 54 more"


@pytest.mark.parametrize("height", [24, 40, 60])
@pytest.mark.parametrize(("num_preprocessors", "num_ranks"), [(1, 1), (64, 1), (2, 64), (64, 64)])
def test_a_screen_is_filled_and_never_overrun(height: int, num_preprocessors: int, num_ranks: int) -> None:
    lines = shown(status(num_preprocessors=num_preprocessors, num_ranks=num_ranks), height=height)
    assert len(lines) <= height
    if max(num_preprocessors, num_ranks) > height:
        assert len(lines) >= height - 6


def test_shares_asked_for_and_delivered_stand_side_by_side() -> None:
    lines = shown(status())
    assert next(line for line in lines if line.startswith("web")).split()[:4] == ["web", "70%", "69%", "75%"]
    assert next(line for line in lines if line.startswith("books")).split()[:4] == ["books", "30%", "31%", "25%"]


def test_jobs_that_ended_take_a_line_each() -> None:
    done = jobs_pb2.JOB_STATE_DONE
    lines = shown(*(status(f"old-{n}", state=done) for n in range(5)), status())
    assert lines[-4:] == [*(f"job old-{n} done after 41 steps" for n in (2, 3, 4)), "and 2 more that ended"]
    assert sum("next step" in line for line in lines) == 1


def test_a_service_without_jobs_says_how_to_start_one() -> None:
    assert shown()[-1] == "no jobs: start one with `headrace job submit JOB.yaml`"


def test_names_are_no_markup() -> None:
    assert any("[red]" in line for line in shown(status(sources=[SourceStatus(source="[red]", share=1.0)])))


def test_the_json_form() -> None:
    before, now = status(), status(committed_steps=45, committed_samples=720, data_wait_s=3.5, step_s=12.0)
    seen = figures([[Look(at_s=0.0, status=before), Look(at_s=2.0, status=now)]])
    assert json.loads(json.dumps(seen)) == seen
    assert seen["service"] == {"leader": "10.0.0.1:7070", "term": 2, "up_s": 8040.0, "preprocessors_needed": 2}
    [job] = seen["jobs"]
    assert (job["samples_per_s"], job["steps_per_s"], job["data_wait_fraction"]) == (32.0, 2.0, pytest.approx(0.05))
    assert set(job["bottleneck"]) == {"sentence", "remedy", "more_preprocessors"}
    assert job["ranks"][0] == {"rank": 0, "next_step": 41, "data_wait_s": 0.1, "data_wait_fraction": 0.25}
    assert job["sources"][0]["samples_share"] == pytest.approx(452 / 656)
    assert seen["preprocessors"][0]["slots"] == 34


def test_nodes_and_recoveries_of_a_job_that_has_them_take_a_line_each() -> None:
    nodes = [Node(name=name) for name in "abc"]
    cuts = [[(0, 0, 2), (1, 2, 4)], [(2, 0, 4)]]
    pipelines = [
        Pipeline(stages=[PipelineStage(rank=r, unit="llm", first_layer=a, end_layer=b) for r, a, b in cut], num_microbatches=n)
        for cut, n in zip(cuts, (5, 3), strict=True)
    ]
    phases = [Phase(name="detect", seconds=0.0121), Phase(name="rebuild", seconds=0.038)]
    recoveries = [Recovered(generation=n, step=7, phases=phases, change="d was lost") for n in range(2, 7)]
    snapshot = Snapshot(generation=6, nodes=nodes, pipelines=pipelines, choice="2+1 copy the fewest bytes")
    recoverable = status(snapshot=snapshot, recoveries=recoveries)
    lines = shown(recoverable)
    start = lines.index("pipelines 6  3 nodes in pipelines of 2+1 with 5+3 microbatches") + 1
    assert lines[start] == "2+1 copy the fewest bytes"
    assert lines[start + 1] == "recovery 6  step 7  50 ms: detect 12 ms  rebuild 38 ms  d was lost"
    assert [line.split()[:2] for line in lines[start + 2 : start + 5]] == [["recovery", "5"], ["recovery", "4"], []]
    assert len(shown(recoverable, height=24)) <= 24
    [job] = figures([[Look(at_s=0.0, status=recoverable)]])["jobs"]
    assert job["nodes"]["pipelines"][0]["stages"][1] == {
        "node": "b",
        "process": 0,
        "unit": "llm",
        "first_layer": 2,
        "end_layer": 4,
    }
    assert job["recoveries"][-1]["phases_s"] == {"detect": 0.0121, "rebuild": 0.038}


def test_nodes_that_cannot_go_on_say_why() -> None:
    lines = shown(status(snapshot=Snapshot(generation=6, error="1 nodes are left: add 1 or more nodes")))
    assert "pipelines 6  1 nodes are left: add 1 or more nodes" in lines


# -- the command ------------------------------------------------------------------------------------------------------


class Service(JobsClient):
    """Answers as it is told to; an error is raised."""

    def __init__(self, *answers: list[JobStatus] | Exception | KeyboardInterrupt) -> None:
        self.endpoint = "10.0.0.1:7070"
        self._answers: Iterator[Any] = iter(answers)

    def jobs(self, finished: int) -> list[JobStatus]:
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)


def watched(*answers: list[JobStatus] | Exception | KeyboardInterrupt) -> str:
    """All that is written on a terminal, to the interrupt."""
    console = Console(width=80, height=40, force_terminal=True, record=True, file=io.StringIO())
    top._live(top.Watch(Service(*answers), None), 0.001, console)
    return console.export_text()


def test_ctrl_c_leaves_what_was_seen_last() -> None:
    assert WAIT in " ".join(watched([status()], KeyboardInterrupt()).split())


def test_a_service_that_goes_away_is_asked_again_and_its_successor_is_followed() -> None:
    gone = UnavailableError("does not answer")
    text = watched([status()], gone, gone, [status(leader="10.0.0.2:7070", term=3)], KeyboardInterrupt())
    assert re.search(r"10\.0\.0\.1:7070: not connected, trying again; what you see is \d s old", text)
    assert text.rindex("10.0.0.2:7070 leads in term 3") > text.rindex("not connected")


def test_a_job_that_is_not_there_ends_it() -> None:
    with pytest.raises(NotFoundError):
        watched([status()], NotFoundError("no job 'charts'"))


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_an_interval_is_positive(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", interval]) == 2
    assert capsys.readouterr().err == f"headrace top: --interval must be above 0 seconds, got {interval}\n"


def test_the_forecast_of_a_step_stands_beside_what_it_took_once_there_is_one() -> None:
    def line(item: JobStatus) -> list[str]:
        return [text for text in shown(item) if "forecast" in text]

    assert line(status()) == []
    known = status(forecast_step_s=0.97, measured_step_s=1.0)
    assert [text.strip() for text in line(known)] == ["step 1.0 s, forecast 970 ms (-3%)"]
    [job] = figures([[Look(at_s=0.0, status=known)]])["jobs"]
    assert (job["forecast_step_s"], job["measured_step_s"], job["forecast_error"]) == (0.97, 1.0, pytest.approx(-0.03))


def plain(capsys: pytest.CaptureFixture[str], *answers: list[JobStatus] | Exception | KeyboardInterrupt, once: bool) -> list[str]:
    """The first three words of all lines that are printed."""
    top._plain(top.Watch(Service(*answers), None), 0.001, once=once)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    return [" ".join(line.split()[:3]) for line in out.splitlines()]


def test_plain_lines_come_at_every_look_to_the_interrupt_and_say_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    gone = UnavailableError("does not answer")
    lines = [
        "service 10.0.0.1:7070 leads",
        "job charts running",
        "rank charts/0 away",
        "preprocessor worker-pool-7d9f-000000 ready",
    ]
    seen = plain(capsys, *[[status(num_ranks=1)]] * 2, gone, [status(num_ranks=1)], KeyboardInterrupt(), once=False)
    assert seen == [*lines, "service 10.0.0.1:7070 away:", *lines]


def test_plain_lines_once_are_those_of_the_second_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert plain(capsys, [], [status(num_ranks=0, num_preprocessors=0)], once=True)[1:] == ["job charts running"]
    with pytest.raises(UnavailableError):
        plain(capsys, [], UnavailableError("does not answer"), once=True)
