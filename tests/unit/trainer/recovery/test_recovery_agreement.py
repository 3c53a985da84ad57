"""On which version of the weights the nodes go on, whatever each of them has seen of the last vote."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest
from torch import Tensor

from headrace.errors import UnrecoverableError
from headrace.trainer.recovery.layer_transfer import Agreement, Standing, agree
from headrace.trainer.recovery.mesh import Mesh

SIZES = {"front": 4, "back": 8}
FRESH = Standing()


class _Work:
    def wait(self) -> None:
        pass


class Everybody:
    """A group of torch.distributed whose ranks are threads."""

    def __init__(self, num_ranks: int) -> None:
        self._said: list[Tensor | None] = [None] * num_ranks
        self._all_said = threading.Barrier(num_ranks)

    def of(self, rank: int) -> ThreadMesh:
        return ThreadMesh(self, rank, len(self._said))

    def exchange(self, rank: int, own: Tensor) -> Sequence[Tensor]:
        self._said[rank] = own
        self._all_said.wait()
        return [said for said in self._said if said is not None]


class ThreadMesh:
    """What `agree` needs of a Mesh."""

    def __init__(self, group: Everybody, rank: int, num_ranks: int) -> None:
        self.everybody = self
        self.rank, self.num_ranks = rank, num_ranks
        self._group = group

    def allgather(self, into: Sequence[Sequence[Tensor]], own: Sequence[Tensor]) -> _Work:
        for place, said in zip(into[0], self._group.exchange(self.rank, own[0]), strict=True):
            place.copy_(said)
        return _Work()

    def wait(self, work: _Work) -> None:
        work.wait()

    def gather(self, said: bytes, lengths: Sequence[int]) -> list[bytes]:
        assert len(said) == lengths[self.rank]
        return [b"x" * length for length in lengths]

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        yield


def agreed(*nodes: tuple[Standing, str], done: Sequence[set[int]] = (), formations: Sequence[int] = ()) -> list[Agreement]:
    """What nodes agree on that stand so and have these parameters ("front back"), each of which needs all. done: microbatches of
    which each has gradients, of four. formations: for which pipelines their plan was made."""
    everybody = Everybody(len(nodes))
    with ThreadPoolExecutor(len(nodes)) as threads:
        futures = [
            threads.submit(
                agree,
                cast(Mesh, everybody.of(rank)),
                SIZES,
                standing,
                has.split(),
                SIZES,
                b"",
                done=done[rank] if done else (),
                formation=formations[rank] if formations else 1,
                num_microbatches=4,
            )
            for rank, (standing, has) in enumerate(nodes)
        ]
    return [future.result() for future in futures]


def test_who_has_all_of_the_gradients_catches_up_with_who_saw_the_outcome() -> None:
    seen = Standing(applied=8, generation=2, grad_norm=0.5)
    waits = Standing(applied=7, generation=1, vote_pending_generation=2)
    first, second = agreed((waits, "front"), (seen, "back"))
    assert first.standing == second.standing == seen
    assert (first.catches_up, second.catches_up) == (True, False)
    assert [(move.name, move.source, move.target) for move in first.transfers] == [("back", 1, 0), ("front", 0, 1)]


def test_who_waits_for_a_step_that_was_skipped_is_told_so() -> None:
    seen = Standing(applied=8, generation=2, grad_norm=math.nan)
    waits = Standing(applied=7, generation=1, vote_pending_generation=2)
    first, second, third = agreed((waits, "front"), (seen, "back"), (seen, "back"))
    assert all(math.isnan(one.standing.grad_norm) and one.standing.applied == 8 for one in (first, second, third))
    assert (first.catches_up, second.catches_up, third.catches_up) == (True, False, False)


def test_a_vote_of_another_generation_is_another_step() -> None:
    """A node that was away asked for a vote in generation 2; the others have voted on that step again in generation 3."""
    away = Standing(applied=7, generation=1, vote_pending_generation=2)
    others = Standing(applied=8, generation=3)
    first, second = agreed((away, "front back"), (others, "front back"))
    assert not first.is_current
    assert not first.catches_up
    assert {move.target for move in second.transfers} == {0}


def test_nothing_is_lost_to_a_node_that_alone_has_come_further() -> None:
    """It saw an outcome that nobody else did, was away, and came back before the others had repeated the step."""
    further = Standing(applied=8, generation=2)
    others = Standing(applied=7, generation=2)
    agreements = agreed((further, "front"), (others, "front"), (others, "back"))
    assert all(agreement.standing == others for agreement in agreements)
    assert [agreement.is_current for agreement in agreements] == [False, True, True]


def test_what_no_version_has_all_of_is_lost() -> None:
    with pytest.raises(UnrecoverableError, match="no node is left that has back"):
        agreed((Standing(applied=8, generation=2), "front"), (FRESH, ""))


def test_nodes_that_all_begin_have_nothing_to_move() -> None:
    for agreement in agreed((FRESH, ""), (FRESH, "")):
        assert agreement.standing.applied < 0
        assert agreement.transfers == []


def test_gradients_of_the_next_step_count() -> None:
    stands = Standing(applied=7, generation=1)
    for agreement in agreed((stands, "front back"), (stands, "front back"), done=[{0, 2}, set()]):
        assert agreement.done == [{0, 2}, set()]


def test_gradients_by_the_plan_for_the_newest_pipelines_count_and_others_do_not() -> None:
    """Their microbatches have the same numbers and other samples."""
    stands = Standing(applied=7, generation=1)
    for agreement in agreed((stands, "front back"), (stands, "front back"), done=[{0, 2}, {1}], formations=(3, 4)):
        assert (agreement.formation, agreement.done) == (4, [set(), {1}])


def test_pipelines_of_nodes_that_have_done_nothing_do_not_count() -> None:
    stands = Standing(applied=7, generation=1)
    for agreement in agreed((stands, "front back"), (stands, "front back"), done=[{0, 2}, set()], formations=(3, 4)):
        assert (agreement.formation, agreement.done) == (3, [{0, 2}, set()])


def test_gradients_of_a_step_that_others_have_applied_count_no_more() -> None:
    seen, waits = Standing(applied=8, generation=2), Standing(applied=7, generation=1, vote_pending_generation=2)
    for agreement in agreed((waits, "front back"), (seen, "front back"), done=[{0, 2}, {1}]):
        assert agreement.done == [set(), {1}]


def test_gradients_of_another_version_of_the_weights_count_no_more() -> None:
    away, others = Standing(applied=7, generation=1), Standing(applied=7, generation=2)
    for agreement in agreed((away, "front back"), (others, "front back"), done=[{0}, {1}]):
        assert agreement.done == [set(), {1}]
