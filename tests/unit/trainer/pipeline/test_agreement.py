"""Processes that were started otherwise, and replicas with other weights, are told before anything is learnt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from headrace.errors import HeadraceError
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.agreement import check_alike, warn_differences
from headrace.trainer.replica_check import check_replicas, digests

CPU = torch.device("cpu")
RANKS = range(3)


@pytest.fixture
def everybody() -> Iterator[Callable[[Callable[[int, ProcessGroupGloo], None]], list[str]]]:
    """(check of a rank and its group) -> what each rank raised: "" where nothing."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(RANKS)) as pool:
        groups = list(pool.map(lambda rank: ProcessGroupGloo(store, rank, len(RANKS)), RANKS))

        def said(check: Callable[[int, ProcessGroupGloo], None], rank: int) -> str:
            try:
                check(rank, groups[rank])
            except HeadraceError as err:
                return str(err)
            return ""

        yield lambda check: list(pool.map(lambda rank: said(check, rank), RANKS))


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"embed": torch.randn(5, 3, generator=generator).to(dtype), "norm": torch.randn(4, generator=generator)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_replicas_are_let_through(everybody, dtype: torch.dtype) -> None:
    assert everybody(lambda _, group: check_replicas(weights(1, dtype).items(), group, "llm", CPU)) == [""] * 3


def test_a_replica_with_other_weights_is_named_by_all(everybody) -> None:
    said = everybody(lambda rank, group: check_replicas(weights(int(rank == 2)).items(), group, "stage 1 of llm", CPU))
    assert len(set(said)) == 1
    assert said[0].startswith("replicas 2 of stage 1 of llm begin with other weights than replica 0, first in embed, and")


def test_replicas_that_drift_apart_are_named_with_the_first_weight_and_the_step(everybody) -> None:
    drifted = weights(1)
    drifted["norm"].view(torch.int32)[3] ^= 1
    named = {0: weights(1), 1: drifted, 2: drifted}
    said = everybody(lambda rank, group: check_replicas(named[rank].items(), group, "the model", CPU, step=199))
    assert len(set(said)) == 1
    assert said[0].startswith("after step 199 replicas 1, 2 of the model have other weights than replica 0, first in norm: they")


def test_a_replica_that_is_alone_has_nobody_to_differ_from() -> None:
    check_replicas(weights(1).items(), None, "llm", CPU)


def test_one_bit_of_one_weight_makes_another_digest_of_it() -> None:
    one, other = weights(1), weights(1)
    assert torch.equal(digests(one.values()), digests(other.values()))
    other["embed"].view(torch.int32)[2, 1] ^= 1
    assert (digests(one.values()) == digests(other.values())).tolist() == [False, True]


def test_replicas_are_compared_every_so_many_steps() -> None:
    assert [step for step in range(7) if OptimizerSpec(check_replicas_every=3).checks_replicas(step)] == [2, 5]
    assert not any(OptimizerSpec(check_replicas_every=0).checks_replicas(step) for step in range(200))


def test_processes_that_were_started_otherwise_are_named_with_what_to_give_them(everybody) -> None:
    alike = {"--precision": "bf16", "--topology": {"units": {"llm": {"dp": 2}}}}
    assert everybody(lambda _, group: check_alike(alike, group, CPU)) == [""] * 3
    said = everybody(lambda rank, group: check_alike(alike | {"--precision": "fp32" if rank else "bf16"}, group, CPU))
    assert len(set(said)) == 1
    assert "processes 1, 2 were started otherwise than process 0" in said[0]
    assert "the same --precision, --topology" in said[0]


def test_what_differs_from_a_checkpoint_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_differences({}, {"precision": "bf16"})
        warn_differences({"precision": "bf16"}, {"precision": "bf16", "model": "tiny"})
        assert not caplog.messages
        warn_differences({"precision": "bf16", "frozen": {"llm": True}}, {"precision": "fp32", "frozen": {"llm": False}})
    assert len(caplog.messages) == 2
    assert "precision" in caplog.messages[0]
    assert "frozen" in caplog.messages[1]
