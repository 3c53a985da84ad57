"""All checks of a running stack, in the order in which they are made: each needs those before it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime

from headrace.admission import release
from headrace.cli.doctor import job_state, reaching, service_state
from headrace.cli.doctor.diagnosis import Diagnosis, Say, State, examined, fault, worst
from headrace.errors import EndpointError, HeadraceError
from headrace.identity import Identity
from headrace.jobs_client import JobsClient
from headrace.rates import Look, Looks
from headrace.rpc import check_endpoint

LISTED_FINISHED = 5  # jobs that are over, the latest, of which those that failed are told
LOOK_S = 1.0  # between the two looks from which rates are computed


def examine_stack(endpoint: str, say: Say, look_s: float = LOOK_S) -> list[Diagnosis]:
    """Examine the services at HOST:PORT, or at several separated by commas. `look_s`: between two looks at running jobs.

    Raises EndpointError if an endpoint is malformed.
    """
    endpoints = [check_endpoint(one) for one in endpoint.split(",")]
    now = datetime.now(UTC)
    say("papers")
    own, found = reaching.own_papers(now)
    if worst(found) is State.FAULT:
        return found
    leaders = []
    for one in endpoints:
        say(one)
        leads, seen = _reached(one, own, now, alone=len(endpoints) == 1)
        leaders += [one] if leads else []
        found += seen
    if leaders:
        say("service")
        found += examined("service", lambda: _service(endpoint, say, look_s))
    elif worst(found) is not State.FAULT and len(endpoints) > 1:
        see = "see their logs, and whether their store answers"
        found.append(fault("service", f"none of {', '.join(endpoints)} leads", see))
    return found


def _reached(one: str, own: Identity | None, now: datetime, *, alone: bool) -> tuple[bool, list[Diagnosis]]:
    leads = False

    def reach() -> Iterable[Diagnosis]:
        nonlocal leads
        leads, seen = reaching.reach(one, own, now, alone=alone)
        return seen

    found = examined(one, reach)
    return leads, found


def _service(endpoint: str, say: Say, look_s: float) -> list[Diagnosis]:
    with JobsClient(endpoint) as client:
        asked_s = time.time()
        try:
            status = client.about()
        except EndpointError:  # it has no such method
            status = None
        except HeadraceError as err:
            return [reaching.refusal(err)]
        answered_s = time.time()
        say("jobs")
        looks = _looks(client, look_s)
    found = [reaching.admitted()]
    if status is None:
        found.append(service_state.of_an_older_release())
    else:
        needed = any(job_state.waits_for_preprocessors(one[-1].status) for one in looks)
        found += [
            *service_state.releases(status, release()),
            *service_state.clocks(status, asked_s, answered_s),
            *service_state.store(status),
            *service_state.preprocessors(status, endpoint, needed=needed),
        ]
    return found + examined("jobs", lambda: job_state.jobs(looks))


def _looks(client: JobsClient, look_s: float) -> list[list[Look]]:
    """Return a look at each job that there is anything to examine of; two, if any of them is being trained."""
    held: dict[str, Looks] = {}
    while True:
        now_s, statuses = time.monotonic(), [one for one in client.jobs(LISTED_FINISHED) if job_state.is_examined(one)]
        is_second, held = bool(held), {one.job: held.get(one.job, Looks()) for one in statuses}
        for one in statuses:
            held[one.job].add(Look(at_s=now_s, status=one))
        if is_second or not any(one.ranks for one in statuses):
            return [looks.held for looks in held.values()]
        time.sleep(look_s)
