"""What each place of the LLM has of a portion where several share its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.block_distribution import BLOCK
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.spec import parse
from headrace.trainer.context.gathered_attention import GatheredAttention
from headrace.trainer.pipeline.cargo import Cargo
from headrace.trainer.pipeline.context_cargo import BLOCKS_OF_PLACE, ContextCargoMaker, block_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.stage_building import LlmEntry, LlmStage, build_stages
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Exchanges, row_ranges
from tests.verify.batches import AUDIO_TOKEN, IMAGE_TOKEN, packed_samples, whole_model

SAMPLES = (0, 3, 6, 9)
LAYERS = 6
BOTH = ("vision", "audio")
TOKENS = {"vision": [IMAGE_TOKEN], "audio": [AUDIO_TOKEN], ENCODER: [IMAGE_TOKEN, AUDIO_TOKEN]}
"""Ids of the placeholders."""


@contextmanager
def place_of_several(part: int, cp: int) -> Iterator[dist.ProcessGroup]:
    """One process of a group, the others of which are torch's fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=part, world_size=cp)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def topology_of(encoders: Sequence[str], **llm: int) -> PipelineTopology:
    return parse(PipelineTopology, {"units": {**{unit: {} for unit in encoders}, LLM: llm}}, "topology")


def routes_of(topology: PipelineTopology, samples: Sequence[int] = SAMPLES) -> Routes:
    """Of one microbatch, which encoders take in another order."""
    orders = {unit: tuple(samples) if unit == LLM else tuple(reversed(samples)) for unit in topology.units}
    planned = Topology(replicas=1, microbatches=1, stages=topology.stages)
    plan = StepPlan(strategy="by hand", seed=0, topology=planned, replicas=[[Microbatch(units=orders)]])
    return Routes(plan, topology.replicas)


def cargoes(
    encoders: Sequence[str], cp: int, *, tp: int = 1, stage: int = 0, pp: int = 1, samples: Sequence[int] = SAMPLES
) -> list[Cargo]:
    """Those of all places of a stage."""
    topology = topology_of(encoders, cp=cp, tp=tp, pp=pp)
    routes = routes_of(topology, samples)
    [portion] = routes.portions(LLM, 0)
    cuts = [LAYERS * number // pp for number in range(pp + 1)]
    found = []
    for part, tensor_slice in product(range(cp), range(tp)):
        with place_of_several(part, cp) as group:
            place = Place(LLM, 0, stage, part * tp + tensor_slice)
            [one] = build_stages(
                whole_model, topology, place, cuts, seed=1, device=torch.device("cpu"), slices=None, context=group
            )
            assert isinstance(one, LlmStage)
            found.append(ContextCargoMaker(topology, place, [one])(routes, portion, packed_samples(portion.samples, audio=True)))
    return found


def entry(cargo: Cargo) -> LlmEntry:
    found = cargo.inputs[0].entry
    assert isinstance(found, LlmEntry)
    return found


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_each_token_and_each_target_is_on_one_place(cp: int) -> None:
    whole = packed_samples(SAMPLES, audio=True)
    places = cargoes(BOTH, cp)
    assert sum(cargo.num_rows for cargo in places) == len(whole.input_ids)
    owned = torch.cat([entry(cargo).input_ids for cargo in places])
    assert torch.equal(owned.sort().values, whole.input_ids.sort().values)
    assert sum(cargo.inputs[0].end.target_weight for cargo in places) == pytest.approx(whole.target_weight)
    assert {cargo.most_rows for cargo in places} == {max(cargo.num_rows for cargo in places)}, "known to all"
    assert max(cargo.num_rows for cargo in places) <= (1 + 1 / BLOCKS_OF_PLACE) * len(whole.input_ids) / cp + 1
    for cargo in places:
        _, segments = cargo.inputs[0].layers
        assert isinstance(segments.attend, GatheredAttention)
        assert segments.attend.num_rows == cargo.num_rows


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("encoders", [BOTH, (ENCODER,)], ids="-".join)
def test_media_come_to_the_places_in_equal_shares_and_each_takes_those_of_its_placeholders(
    encoders: tuple[str, ...], cp: int, tp: int
) -> None:
    """A row is told by its sample, its encoder and its number in the sample: 1000 s + 100 e + n."""
    topology, places = topology_of(encoders, cp=cp, tp=tp), cargoes(encoders, cp, tp=tp)
    routes, data = routes_of(topology), packed_samples(SAMPLES, audio=True)
    for unit in encoders:
        [source] = routes.portions(unit, 0)
        counts = {
            sample: [int((data.input_ids[first:end] == token).sum()) for token in TOKENS[unit]]
            for sample, first, end in zip(SAMPLES, data.cu_seqlens[:-1].tolist(), data.cu_seqlens[1:].tolist(), strict=True)
        }
        made = torch.tensor([row for sample in source.samples for row in rows_of(sample, counts[sample])])
        ranges = row_ranges(packed_samples(source.samples, audio=True), torch.tensor([sum(counts[s]) for s in source.samples]))
        sent, _ = Exchanges(topology, Place(unit, 0, 0, 0)).leaving(routes.out_of(source), ranges)
        shares = [made[exchange.rows] for exchange in sent]
        assert max(map(len, shares)) - min(map(len, shares)) <= cp * tp
        gathered = []
        for number, (cargo, share) in enumerate(zip(places, shares, strict=True)):
            [exchange], join = [one for one in cargo.arriving if one.unit == unit], cargo.joins[unit]
            assert exchange.num_rows == len(share)
            assert (join.num_rows, join.order) == (tp * join.num_own, None), "of the slices of its layers, which join them first"
            begin = number % tp * join.num_own
            assert exchange.rows == slice(begin, begin + len(share)), "whose gradients it sends back"
            gathered.append(torch.cat([share, share.new_zeros(join.num_own - len(share))]))
        for cargo in places:
            own = torch.cat(gathered)[entry(cargo).received[unit]]
            placeholders = sum(len(entry(cargo).placeholders[part]) for part in (BOTH if unit == ENCODER else [unit]))
            assert len(own) == placeholders
            assert torch.equal(own, own.sort().values), "in the order of the placeholders"
        taken = torch.cat([torch.cat(gathered)[entry(cargo).received[unit]] for cargo in places[::tp]])
        assert torch.equal(taken.sort().values, made.sort().values), "each row is taken once"


def rows_of(sample: int, counts: Sequence[int]) -> list[int]:
    return [1000 * sample + 100 * encoder + number for encoder, count in enumerate(counts) for number in range(count)]


def test_nothing_comes_to_a_later_stage_but_hidden_states_of_the_same_rows() -> None:
    firsts, lasts = (cargoes(BOTH, 2, stage=stage, pp=2) for stage in (0, 1))
    for first, last in zip(firsts, lasts, strict=True):
        assert first.num_rows == last.num_rows
        assert (last.arriving, last.joins, last.inputs[0].entry) == ((), {}, None)


def test_where_there_are_fewer_tokens_than_places_the_others_have_padding_without_targets() -> None:
    short = next(sample for sample in range(100) if len(packed_samples((sample,), audio=True).input_ids) < 8)
    whole, places = packed_samples((short,), audio=True), cargoes(BOTH, 8, samples=(short,))
    assert [cargo.num_rows for cargo in places] == [1] * 8
    assert sum(cargo.inputs[0].end.target_weight for cargo in places) == pytest.approx(whole.target_weight)
    placeholders = [sum(map(len, entry(cargo).placeholders.values())) for cargo in places]
    assert sum(placeholders) == sum(int((whole.input_ids == token).sum()) for token in TOKENS[ENCODER])


def test_blocks_are_smaller_where_there_are_few_tokens() -> None:
    assert block_of(1_000_000, 4) == BLOCK
    assert block_of(2, 2) == 1
    for tokens in range(3, 2000, 7):
        assert -(-tokens // block_of(tokens, 3)) >= min(tokens, 3 * BLOCKS_OF_PLACE)
