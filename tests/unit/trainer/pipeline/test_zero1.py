"""Which part of which parameter a replica updates, and the optimizer of a process that is alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline import buckets
from headrace.trainer.pipeline.buckets import make_buckets
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from headrace.trainer.train_step import make_optimizer

SHAPES = st.lists(st.sampled_from([(1,), (3,), (2, 5), (7, 7), (40,)]), min_size=1, max_size=8)


@given(SHAPES, st.integers(1, 5), st.integers(1, 60))
def test_every_element_is_in_one_piece_of_one_replica(shapes: list[tuple[int, ...]], num_replicas: int, elements: int) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_ELEMENTS", elements)
        made = make_buckets(parameters, num_replicas)
    assert [parameter for bucket in made for parameter in bucket.parameters] == parameters
    assert all(map(torch.equal, parameters, before)), "their values are as before"
    for bucket in made:
        assert len(bucket.parameters) == 1 or sum(p.numel() for p in bucket.parameters) <= elements
        assert len({len(bucket.shard(bucket.weights, replica)) for replica in range(num_replicas)}) == 1
        updates = {parameter: torch.zeros(parameter.numel()) for parameter in bucket.parameters}
        for replica in range(num_replicas):
            for parameter, weight, begin in bucket.pieces(replica):
                updates[parameter][begin : begin + weight.numel()] += 1
                assert torch.equal(weight, parameter.flatten()[begin : begin + weight.numel()])
        assert all((update == 1).all() for update in updates.values())


def test_of_one_replica_it_is_adamw() -> None:
    sharded, plain = (nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)) for _ in range(2))
    plain.load_state_dict(sharded.state_dict())
    settings = OptimizerSpec(weight_decay=0.5, decay_embeddings=False)
    of_sharded, of_plain = ({model[0].weight} for model in (sharded, plain))
    optimizer = ShardedAdamW([list(sharded.parameters())], None, settings=settings, embeddings=of_sharded)
    expected = make_optimizer(plain.parameters(), settings, embeddings=of_plain)
    for options in expected.param_groups:
        options["lr"] = 0.1
    for _ in range(3):
        expected.zero_grad()
        for model in (sharded, plain):
            model(torch.tensor([1, 3])).square().sum().backward()
        optimizer.reduce()
        optimizer.step(0.1)
        optimizer.discard()
        expected.step()
    for one, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(dict(optimizer.state())[one][kind], state) for kind, state in expected.state[other].items())


def test_what_has_no_gradient_stays_as_it_is() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = ShardedAdamW([list(model.parameters())], None)
    model.bias.grad = torch.ones(2)
    optimizer.reduce()
    optimizer.step(0.1)
    assert torch.equal(model.weight, before)
    assert [parameter for parameter, _ in optimizer.state()] == [model.bias]


def test_a_state_that_is_loaded_is_the_state() -> None:
    model = nn.Linear(3, 2)
    one, other = (ShardedAdamW([list(model.parameters())], None) for _ in range(2))
    model(torch.ones(1, 3)).sum().backward()
    one.reduce()
    one.step(0.1)
    for parameter, state in one.state():
        other.load_state(parameter, state)
    for parameter, state in other.state():
        assert all(torch.equal(some, dict(one.state())[parameter][kind]) for kind, some in state.items())


def test_a_bucket_is_summed_as_soon_as_the_last_backward_has_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 1)
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    events: list[str] = []
    optimizer = ShardedAdamW([list(layers.parameters())], None)
    for number, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda *_, number=number: events.append(f"backward of {number}"))
    for number, bucket in zip((2, 1, 0), optimizer._buckets, strict=True):
        _record(bucket, f"sum of {number}", events)
    x = torch.ones(2, 4, requires_grad=True)
    layers(x).sum().backward()
    assert events == ["backward of 2", "backward of 1", "backward of 0"], "another backward is to come"
    events.clear()
    optimizer.last_backward(0)
    layers(x).sum().backward()
    optimizer.ran_backward(0)
    assert events.index("sum of 2") < events.index("backward of 0")
    assert [event for event in events if event.startswith("sum")] == ["sum of 2", "sum of 1", "sum of 0"]


def test_buckets_are_summed_in_one_order_though_their_gradients_come_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 1)
    first, second, third = (nn.Linear(2, 2, bias=False) for _ in range(3))
    events: list[str] = []
    optimizer = ShardedAdamW([[third.weight], [first.weight, second.weight]], None)
    for name, bucket in zip(("second", "first", "third"), optimizer._buckets, strict=True):
        _record(bucket, name, events)
    optimizer.last_backward(0)
    third(torch.ones(1, 2)).sum().backward()
    optimizer.ran_backward(0)
    assert events == [], "other replicas may have run chunk 1 before it"
    optimizer.last_backward(1)
    first(torch.ones(1, 2)).sum().backward()
    assert events == []
    optimizer.ran_backward(1)
    assert events == ["second", "first", "third"]


def _record(bucket: buckets.Bucket, event: str, events: list[str]) -> None:
    begin_sum = bucket.begin_sum

    def begins(group: object) -> None:
        events.append(event)
        begin_sum(None)

    bucket.begin_sum = begins  # type: ignore[method-assign]
