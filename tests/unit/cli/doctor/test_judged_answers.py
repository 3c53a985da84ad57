"""What a service says of itself and of its jobs, judged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.cli.doctor import job_state, service_state
from headrace.cli.doctor.diagnosis import Diagnosis, State, examined, from_sentence, worst
from headrace.rates import Look
from headrace.v1 import jobs_pb2
from headrace.v1.jobs_pb2 import JobStatus, PreprocessorStatus, RankStatus, ServiceStatus

NOW_S = 1_800_000_000.0


def service(**fields: Any) -> ServiceStatus:
    running: dict[str, Any] = {
        "release": "0.3.0",
        "protocol": 1,
        "leader": "10.0.0.1:7070",
        "term": 2,
        "up_s": 7300.0,
        "clock_s": NOW_S,
        "store_tells": True,
        "preprocessors": [PreprocessorStatus(preprocessor="a", slots=4, store_budget_bytes=512 << 20, release="0.3.0")],
    }
    return ServiceStatus(**running | fields)


def job(name: str = "demo", **fields: Any) -> JobStatus:
    running: dict[str, Any] = {
        "job": name,
        "state": jobs_pb2.JOB_STATE_RUNNING,
        "committed_steps": 10,
        "committed_samples": 160,
        "num_steps": 100,
        "step_s": 10.0,
        "planned_steps": 4,
        "spec_json": json.dumps({"window": 4, "window_bytes": None}),
        "preprocessors": [PreprocessorStatus(preprocessor="a", slots=6)],
        "ranks": [RankStatus(rank=0, committed_steps=10, step_s=1.0)],
        "leader": "10.0.0.1:7070",
    }
    return JobStatus(**running | fields)


def looked(*statuses: JobStatus) -> list[list[Look]]:
    return [[Look(at_s=0.0, status=one)] for one in statuses]


def test_a_service_of_this_release_is_well() -> None:
    (one,) = service_state.releases(service(), "0.3.0")
    assert (one.state, one.found) == (State.OK, "10.0.0.1:7070 leads in term 2, for 2 h; 0.3.0, protocol 1, as here")


def test_a_service_of_another_release_is_named() -> None:
    (one,) = service_state.releases(service(release="0.2.1", preprocessors=[]), "0.3.0")
    assert one.state is State.WARNING
    assert one.found.endswith("it is of release 0.2.1, and this one is of 0.3.0")
    assert one.remedy.startswith("run one release everywhere (docs/upgrading.md")


def test_many_preprocessors_of_another_release_are_counted() -> None:
    members = [PreprocessorStatus(preprocessor=f"p{n}", release="0.2.1") for n in range(9)]
    *_, one = service_state.releases(service(preprocessors=members), "0.3.0")
    assert one.found == "other than the service's 0.3.0: p0 (0.2.1), p1 (0.2.1), p2 (0.2.1) and 6 more"


@pytest.mark.parametrize(
    ("ahead_s", "delay_s", "state"),
    [
        (0.4, 0.0, State.OK),
        (-4.9, 0.0, State.OK),
        (90.0, 0.0, State.WARNING),
        (-7200.0, 0.2, State.WARNING),
        (6.0, 4.0, State.OK),
    ],
)
def test_clocks_that_differ_are_found_as_far_as_can_be_told(ahead_s: float, delay_s: float, state: State) -> None:
    (one,) = service_state.clocks(service(clock_s=NOW_S + ahead_s), NOW_S - delay_s, NOW_S + delay_s)
    assert one.state is state
    if ahead_s == 90.0:
        assert one.found == "the service's is 90 s ahead of this machine's"


def test_a_store_that_does_not_tell_is_asked_about() -> None:
    (one,) = service_state.store(service(store_tells=False))
    assert (one.state, one.found) == (State.OK, "Redis, which does not tell its settings")
    (one,) = service_state.store(service(embedded_store=True))
    assert one.found == "embedded, on the service's machine; every commit is on its disk before it counts"


def test_silent_preprocessors_are_found() -> None:
    silent = PreprocessorStatus(preprocessor="b", endpoint="10.0.0.9:7100", silent=True)
    one, others = service_state.preprocessors(service(preprocessors=[silent]), "10.0.0.1:7070", needed=True)
    assert (one.state, others.state) == (State.WARNING, State.OK)
    assert one.found == "have had work for long without a report: b (10.0.0.9:7100)"


def test_the_worst_jobs_come_first() -> None:
    failed = job("failed", state=jobs_pb2.JOB_STATE_FAILED, message="the disk is full")
    unread = job("unread", state=jobs_pb2.JOB_STATE_SET_ASIDE, message="its state is 'ODD'", spec_json="")
    waits = job("waits", data_wait_s=5.0)
    untrained = job("untrained", ranks=[])
    found = list(job_state.jobs(looked(job(), waits, failed, unread, untrained)))
    assert [(one.check, one.state) for one in found] == [
        ("job unread", State.FAULT),
        ("job waits", State.WARNING),
        ("job failed", State.WARNING),
        ("job untrained", State.WARNING),
        ("job demo", State.OK),
    ]
    by_check = {one.check: one for one in found}
    assert by_check["job failed"].found == "failed after 10 steps: the disk is full"
    assert by_check["job waits"].found.startswith("running, step 10 of 100; trainers wait 50% of their time for data: ")
    assert by_check["job untrained"].remedy.startswith("start one with `headrace train")
    assert "trainer is the slowest part" in by_check["job demo"].found


def test_rates_are_those_between_two_looks() -> None:
    later = job(committed_steps=12, committed_samples=192, step_s=12.0)
    *_, rates = job_state.jobs([[Look(at_s=0.0, status=job()), Look(at_s=2.0, status=later)]])
    assert rates.found == "in 2.0 s: 16.0 samples/s committed in 1.00 steps/s, 0.0 samples/s decoded"


def test_of_very_many_jobs_the_worst_are_told() -> None:
    found = list(job_state.jobs(looked(*(job(f"j{n}") for n in range(30)))))
    assert found[job_state.MAX_JOBS].found == "10 more, which are no worse"


def test_what_is_over_is_not_examined() -> None:
    over = (jobs_pb2.JOB_STATE_DONE, jobs_pb2.JOB_STATE_CANCELLED)
    assert not any(job_state.is_examined(job(state=state)) for state in over)
    assert job_state.waits_for_preprocessors(job(preprocessors=[]))
    assert not job_state.waits_for_preprocessors(job(preprocessors=[], paused=True))


def test_a_check_that_fails_is_a_fault() -> None:
    def fails() -> list[Diagnosis]:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup")

    (one,) = examined("memory", fails)
    assert (one.check, one.state) == ("memory", State.FAULT)
    assert one.found == "cannot be examined (PermissionError: [Errno 13] Permission denied: '/sys/fs/cgroup')"
    assert one.remedy


def test_a_sentence_is_taken_apart_at_its_last_colon() -> None:
    one = from_sentence("TLS", "a:1 speaks no TLS: start it with --tls DIR")
    assert (one.found, one.remedy) == ("a:1 speaks no TLS", "start it with --tls DIR")
    assert from_sentence("TLS", "it is away").found == "it is away"
    assert worst([]) is State.OK
