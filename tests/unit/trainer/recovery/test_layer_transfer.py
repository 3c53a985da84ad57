"""Who sends what to whom after a change of the nodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, UnrecoverableError
from headrace.trainer.recovery.layer_transfer import Transfer, check_digest, digest, plan_transfers

RANKS = st.sets(st.integers(0, 5))
MODELS = st.dictionaries(
    st.sampled_from([f"layer.{number}" for number in range(12)]), st.tuples(RANKS, RANKS, st.integers(1, 99))
)


def test_only_what_is_missing_moves() -> None:
    transfers = plan_transfers({"a": [0, 1, 2], "b": [1]}, {"a": [0, 2], "b": [1]}, {"a": 8, "b": 8})
    assert [(item.name, item.source, item.target) for item in transfers] == [("a", 0, 1)]


def test_several_sources_share_the_sending() -> None:
    sizes = dict.fromkeys("abcd", 10)
    transfers = plan_transfers({name: [2] for name in "abcd"}, {name: [0, 1] for name in "abcd"}, sizes)
    assert sorted(item.source for item in transfers) == [0, 0, 1, 1]


def test_what_nobody_has_any_more_is_named() -> None:
    with pytest.raises(UnrecoverableError, match=r"no node is left that has decoder\.norm\.weight"):
        plan_transfers({"decoder.norm.weight": [0]}, {"decoder.norm.weight": []}, {"decoder.norm.weight": 4})


def test_what_nobody_needs_may_be_lost() -> None:
    assert plan_transfers({"audio.norm": []}, {"audio.norm": []}, {"audio.norm": 4}) == []


@given(MODELS)
def test_everybody_gets_what_it_lacks_once_and_from_a_holder(model: dict[str, tuple[set[int], set[int], int]]) -> None:
    wanted = {name: sorted(needs) for name, (needs, has, _) in model.items() if has or not needs}
    holders = {name: sorted(model[name][1]) for name in wanted}
    sizes = {name: model[name][2] for name in wanted}
    transfers = plan_transfers(wanted, holders, sizes)
    got = {(item.name, item.target) for item in transfers}
    assert len(got) == len(transfers)
    assert got == {(name, rank) for name in wanted for rank in wanted[name] if rank not in holders[name]}
    assert all(item.source in holders[item.name] for item in transfers)


@given(st.integers(0, 2), st.integers(0, 6))
def test_a_bit_that_came_otherwise_is_found_wherever_it_is(part: int, element: int) -> None:
    sent = [torch.arange(7.0) + 10 * number for number in range(3)]
    expected = digest(sent)
    came = [some.clone() for some in sent]
    transfer = Transfer(name="layer.0", source=4, target=0)
    check_digest(came, expected, transfer)
    came[part].view(torch.int32)[element] ^= 1
    with pytest.raises(HeadraceError, match=r"layer\.0 came damaged from node 4"):
        check_digest(came, expected, transfer)
