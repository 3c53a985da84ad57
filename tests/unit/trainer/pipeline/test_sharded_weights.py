"""Which weights are there at what time of a forward and a backward, of replicas that keep a shard each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import HeadraceError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.spec import parse
from headrace.trainer.pipeline.buckets import Bucket, make_buckets
from headrace.trainer.pipeline.deadlock import check_order
from headrace.trainer.pipeline.message_order import actions_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.sharded_weights import ShardedWeights, frozen_buckets, whole
from headrace.trainer.pipeline.topology import PipelineTopology

LAYERS, WIDTH = 4, 3


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of one replica, whose shard is everything."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Chunk:
    """Layers without anything in front of them or behind, and the numbers of those whose weights are there at each of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.expected = [layer.weight.detach().clone() for layer in self.layers]
        self.buckets = [self._kept(layer) for layer in self.layers]
        self.weights = ShardedWeights([[], *([bucket] for bucket in self.buckets), []], group)
        self.there: list[list[int]] = []

    @staticmethod
    def _kept(layer: nn.Module) -> Bucket:
        (bucket,) = make_buckets(list(layer.parameters()), 1)
        bucket.keep_shard(0)
        return bucket

    def look(self) -> None:
        self.there.append([number for number, bucket in enumerate(self.buckets) if bucket.is_there])

    def forward(self, x: Tensor) -> Tensor:
        with self.weights.passing(backward=False):
            for number, layer in enumerate(self.layers):
                self.weights.before(1 + number, x)
                self.look()
                x = layer(x).tanh()
                if x.requires_grad:
                    x.register_hook(lambda _: self.look())
            self.weights.before(1 + LAYERS, x)
        return x


def test_only_a_layer_and_the_next_one_are_there(group: dist.ProcessGroup) -> None:
    chunk = Chunk(group)
    assert chunk.weights.buckets == set(chunk.buckets)
    assert chunk.weights.gathered_bytes == 2 * 4 * (WIDTH * WIDTH + WIDTH)
    y = chunk.forward(torch.ones(2, WIDTH, requires_grad=True))
    assert chunk.there == [[0, 1], [1, 2], [2, 3], [3]]
    assert not any(bucket.is_there for bucket in chunk.buckets)
    chunk.there.clear()
    with chunk.weights.passing(backward=True):
        y.sum().backward()
    assert chunk.there == [[3], [2, 3], [1, 2], [0, 1]], "each time before the next but one begins to come"
    assert not any(bucket.is_there for bucket in chunk.buckets)


def test_gradients_are_those_of_weights_that_stay(group: dist.ProcessGroup) -> None:
    chunk, (x, other) = Chunk(group), torch.randn(2, 2, WIDTH)
    outputs = [chunk.forward(x.requires_grad_()), chunk.forward(other)]  # two portions in flight
    for output in outputs:
        with chunk.weights.passing(backward=True):
            output.square().sum().backward()
    plain = [weight.clone().requires_grad_() for weight in chunk.expected]
    buckets = {parameter: bucket for bucket in chunk.buckets for parameter in bucket.parameters}
    biases = [(number, layer.bias) for number, layer in enumerate(chunk.layers)]
    values = [bias.detach().clone() for _, bias in whole(biases, buckets, group)]
    for rows in (x.detach(), other):
        y = rows
        for weight, bias in zip(plain, values, strict=True):
            y = nn.functional.linear(y, weight, bias).tanh()
        y.square().sum().backward()
    for layer, weight in zip(chunk.layers, plain, strict=True):
        assert torch.allclose(layer.weight.grad, weight.grad, rtol=1e-5, atol=1e-7)


def test_a_pass_in_which_nothing_is_computed_gathers_all_the_same(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, begun = Chunk(group), list[int]()
    for number, bucket in enumerate(chunk.buckets):
        begin = bucket.begin_gather
        monkeypatch.setattr(bucket, "begin_gather", lambda *args, n=number, begin=begin: (begun.append(n), begin(*args)))
    y = chunk.forward(torch.ones(2, WIDTH, requires_grad=True))
    with chunk.weights.passing(backward=True):
        y.sum().backward()
    computed = begun.copy()
    begun.clear()
    for backward in (False, True):
        with chunk.weights.passing(backward=backward):
            pass
    assert begun == computed == [0, 1, 2, 3, 3, 2, 1, 0]


def test_what_is_written_while_it_is_there_is_kept(group: dist.ProcessGroup) -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False).to(torch.bfloat16)
    named = list(frozen.named_parameters())
    before = {name: parameter.clone() for name, parameter in named}
    buckets = frozen_buckets({parameter: 0 for _, parameter in named}, group)
    assert len({*buckets.values()}) == 1
    for name, parameter in whole(named, buckets, group, writes=True):
        assert torch.equal(parameter, before[name])
        parameter.fill_(1)
    for _, parameter in whole(named, buckets, group):
        assert (parameter == 1).all()
    assert frozen.weight.untyped_storage().nbytes() == 0


def test_all_replicas_run_the_same_actions_where_one_has_fewer_microbatches() -> None:
    routes = _routes([[(1,), (2,)], [(3,), ()]])
    for shard, number in ((False, 2), (True, 4)):
        units = {"vision": {"dp": 2}, "llm": {"dp": 2, "shard_weights": shard}}
        topology = parse(PipelineTopology, {"units": units}, "topology")
        ((actions,),) = (actions_of(topology, routes, "vision", 1),)
        assert len(actions) == number
        assert len(check_order(topology, routes, [topology.place(1)]).turns) == number
    assert actions_of(topology, routes, "llm", 0) == actions_of(topology, routes, "llm", 1)


def test_a_replica_that_would_wait_forever_is_the_error_of_those_too_that_meet_it_alone_for_weights() -> None:
    """It has in its third microbatch what the LLM takes in its first."""
    routes = _routes([[(1,), (2,), (3,)], [(4,), (5,), (6,)]], llm=[[(1,), (2,), (3,)], [(6,), (5,), (4,)]])
    for shard in (False, True):
        units = {unit: {"dp": 2, "shard_weights": shard} for unit in ("vision", "llm")}
        topology = parse(PipelineTopology, {"units": units}, "topology")
        with pytest.raises(HeadraceError, match="wait for itself") if shard else nullcontext():
            check_order(topology, routes, [topology.place(0)])


def _routes(vision: list[list[tuple[int, ...]]], llm: list[list[tuple[int, ...]]] | None = None) -> Routes:
    replicas = [
        [Microbatch(units={"vision": of_vision, "llm": of_llm}) for of_vision, of_llm in zip(*both, strict=True)]
        for both in zip(vision, llm or vision, strict=True)
    ]
    topology = Topology(replicas=len(replicas), microbatches=len(replicas[0]), stages={"vision": 1, "llm": 1})
    plan = StepPlan(strategy="by hand", seed=0, topology=topology, replicas=replicas)
    return Routes(plan, {"vision": len(replicas), "llm": len(replicas)})
