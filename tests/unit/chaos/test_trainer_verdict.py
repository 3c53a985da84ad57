"""What differs from training that nothing disturbed is seen."""

from __future__ import annotations

from collections import Counter

import numpy as np

from headrace.ledger import LedgerEntry
from tests.chaos.processes import Footprint
from tests.chaos_trainer.faults import Fault, Kind, Place, Where, num_losses
from tests.chaos_trainer.verdict import Trained, judge


def trained(samples: str = "ab", weight: float = 1.0, loss: float = 2.0) -> Trained:
    """A job of one step and one parameter."""
    found = Trained(ledger=[LedgerEntry(step=0, samples=tuple(samples), loss=loss)], steps=1)
    found.weights = {"bias": np.array([weight, 1.0], np.float32)}
    found.losses[0].append(loss)
    found.attempts["n0"] = Counter({0: 1})
    return found


def test_the_same_is_good_up_to_the_order_of_additions() -> None:
    assert judge(trained(), trained(weight=1.000001, loss=2.000001), 0) == []


def test_other_samples_losses_and_weights() -> None:
    assert judge(trained(), trained(samples="ac"), 0) == ["the ledger is another one: steps [0]"]
    assert judge(trained(), trained(loss=2.1), 0) == ["step 0 has losses [2.1], not 2.0"]
    (words,) = judge(trained(), trained(weight=1.1), 0)
    assert words.startswith("1 of 1 parameters differ, bias by")


def test_a_step_counts_as_begun_again_as_often_as_the_busiest_node_did() -> None:
    found = trained()
    found.attempts["n0"][0], found.attempts["n1"][0] = 2, 3
    assert judge(trained(), found, 2) == []
    assert judge(trained(), found, 1) == ["2 steps were begun again, 1 may be"]


def test_a_node_that_grows_with_each_generation() -> None:
    found = trained()
    found.footprints["n0"] = [Footprint(memory_kib=1 << 18, num_fds=60 + number, num_threads=40) for number in range(20)]
    (words,) = judge(trained(), found, 0)
    assert words == "n0 grew: num_fds from 64 to 76 in 12 generations"


def test_a_generation_that_is_not_gone_yet_is_no_growth() -> None:
    found = trained()
    found.footprints["n0"] = [
        Footprint(memory_kib=1 << 18, num_fds=60 + 9 * (n % 2), num_threads=40 + 8 * (n % 2)) for n in range(20)
    ]
    assert judge(trained(), found, 0) == []


def test_a_wait_that_was_given_up_keeps_its_generation_for_a_while() -> None:
    found = trained()
    found.footprints["n0"] = [Footprint(memory_kib=1 << 18, num_fds=60 + 9 * (n > 10), num_threads=40) for n in range(20)]
    assert judge(trained(), found, 0) == ["n0 grew: num_fds from 60 to 69 in 12 generations"]
    found.abandoned["n0"] = [int(n > 10) for n in range(20)]
    assert judge(trained(), found, 0) == []


def test_only_a_node_that_the_others_miss_costs_a_step() -> None:
    where = Where(unit="llm", stage=-1)
    stop = {"place": Place.VOTE, "where": where, "kind": Kind.STOP}
    faults = [Fault(**stop, lasts_s=0.4), Fault(**stop, lasts_s=1.6), Fault(place=Place.VOTE, where=where, kind=Kind.LEAVE)]
    assert num_losses(faults) == 1
    assert [Fault.of_dict(fault.to_dict()) for fault in faults] == faults
    assert where.is_at("n3", 3, 0, "llm", 1, num_stages=2)
    assert not where.is_at("n2", 2, 0, "llm", 0, num_stages=2)
