"""A standing cluster that is struck: alone by what no other test has, and by a few rounds of `python -m tests.chaos`.

The faults that have tests of their own: test_exactly_once (preprocessors killed), test_high_availability (a reorder service
killed and hung, both and Redis killed), test_stalled_preprocessor (one hung), test_wire_faults (payload cut and silent). All
kinds together, for minutes: `make chaos`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.ledger import LedgerEntry
from headrace.transport.base import FLIGHT
from tests.chaos.__main__ import STEPS, run
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Disturbance, Fault, Kind, seeds
from tests.chaos.rounds import Round, run_undisturbed

pytestmark = pytest.mark.integration

SEED = 20
LEASE_S = 1.5
LATE_S = 1.0

ALONE = [
    pytest.param(Fault(kind=Kind.KILL, target="preprocessors", step=2, lasts_s=1.0), marks=pytest.mark.slow),
    Fault(kind=Kind.KILL, target="rank", number=1, step=3, lasts_s=0.5),
    pytest.param(Fault(kind=Kind.HANG, target="redis", step=3, lasts_s=LEASE_S + LATE_S), marks=pytest.mark.slow),
    Fault(kind=Kind.CUT, target="rank-leader", step=3, lasts_s=LATE_S),
    Fault(kind=Kind.CUT, target="preprocessor-leader", step=2, lasts_s=LATE_S),
    pytest.param(Fault(kind=Kind.SILENCE, target="leader-redis", step=3, lasts_s=LEASE_S + LATE_S), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def standing() -> Iterator[tuple[Cluster, list[LedgerEntry]]]:
    """A cluster, and the ledger of an undisturbed job."""
    with Cluster() as cluster:
        outcome, ledger = run_undisturbed(cluster, "calm", STEPS)
        assert outcome.is_good, outcome.errors
        yield cluster, ledger


@pytest.mark.slow
@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.name)
def test_a_fault_changes_nothing(standing: tuple[Cluster, list[LedgerEntry]], fault: Fault) -> None:
    cluster, expected = standing
    disturbance = Disturbance(seed=0, transport=FLIGHT, faults=(fault,))
    outcome = Round(cluster, fault.name.replace(" ", "-"), disturbance, STEPS).run(expected)
    assert [struck.fault for struck in outcome.struck] == [fault]
    assert outcome.is_good, outcome


@pytest.mark.slow
def test_rounds_of_faults_at_random_change_nothing(standing: tuple[Cluster, list[LedgerEntry]]) -> None:
    cluster, _ = standing
    assert run(cluster, seeds(SEED, 2)) == 0
