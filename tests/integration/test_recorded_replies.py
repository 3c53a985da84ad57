"""What ranks of former releases sent is sent again, byte by byte, and answered as it was, with real preprocessors at work."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from headrace.errors import NotFoundError
from headrace.spec import load_spec_json
from headrace.v1.sessions_pb2 import PlanEvent, RankPlan, WholePlan
from tests.histories.history import at_hand, histories
from tests.histories.record import end_of
from tests.histories.replayed_rank import differences, recorded, replay
from tests.integration.conftest import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

APART = {
    "OpenReply.session",  # an id that the service draws
    "OpenReply.spec_json",  # has the paths of data
    "PartLocation.lease",  # an id
    "PartLocation.endpoint",  # an address
}
"""Fields that differ from run to run."""
_AFTER_DEV2 = {
    "RankPlan.num_targets",
    "RankPlan.max_tokens",
    "RankPlan.target_weight",
    "RankPlan.most_microbatches",
    "RankMicrobatch.sources",
    "PlannedUnit.seconds",
}
LATER = {"0.2.dev": {*_AFTER_DEV2, "OpenReply.state", "RankPlan.content"}, "0.2.dev2": _AFTER_DEV2}
"""History -> fields that its release did not tell."""


@pytest.mark.parametrize("job", ["rank", "pipeline"])
@pytest.mark.parametrize("folder", histories("rank.jsonl"))
def test_every_reply_to_a_recorded_rank_has_the_recorded_fields(calm: Cluster, folder: Path, job: str) -> None:
    told = recorded(folder / f"{job}.jsonl")
    with calm.client() as client, contextlib.ExitStack() as after:
        with contextlib.suppress(NotFoundError):
            client.delete(job)  # other tests have one of this name on this cluster
        after.callback(client.delete, job)  # and so has each history
        tells = replay(calm.endpoint, folder / f"{job}.jsonl")
        end = end_of(client, job)
    pairs = [(told.submitted, tells.submitted), (told.opened, tells.opened)]
    assert tells.plans.keys() == told.plans.keys()
    pairs += [(plan, tells.plans[step]) for step, plan in told.plans.items()]
    assert tells.located.keys() >= told.located.keys()
    pairs += [(location, tells.located[part]) for part, location in told.located.items()]
    for former, now in ((told.ended, tells.ended), (told.commits, tells.commits), (told.closed, tells.closed)):
        pairs += zip(former, now, strict=True)
    later = LATER.get(folder.name, set())
    assert [line for former, now in pairs for line in differences(former, now, apart=APART, later=later)] == []
    assert load_spec_json(tells.opened.spec_json) == load_spec_json(at_hand(told.opened.spec_json))
    assert end == json.loads((folder / "ends.json").read_text())[job]


def test_a_field_that_differs_is_named_with_both_values() -> None:
    former = PlanEvent(plan=RankPlan(step=1, microbatches=[{"replica": 1}], whole=WholePlan(strategy="joint")))
    now = PlanEvent(plan=RankPlan(step=2, microbatches=[{"replica": 1, "num_samples": 3}], whole=WholePlan(), max_tokens=0))
    assert list(differences(former, now, apart={"RankMicrobatch.num_samples"}, later=set())) == [
        "plan.step: 1 was told, now 2",
        "plan.whole.strategy: 'joint' was told, now ''",
        "plan.max_tokens: None was told, now 0",
    ]
    left = differences(former, now, apart={"RankPlan.step", "WholePlan.strategy"}, later={"RankPlan.max_tokens"})
    assert list(left) == ["plan.microbatches[0].num_samples: 0 was told, now 3"]
    more = PlanEvent(plan=RankPlan(step=1, microbatches=[{}, {}], whole=WholePlan(strategy="joint")))
    assert list(differences(former, more, apart=(), later=())) == ["plan.microbatches: 1 were told, now 2"]
