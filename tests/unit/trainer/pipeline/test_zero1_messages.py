"""What replicas send each other in a step, and in which order: of one of four, the others of which are torch's fake."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headrace.trainer.pipeline import buckets
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from tests.fake_replicas import fake_replicas

REPLICAS = 4
WIDTH = 8
LAYERS = 3


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 1)  # one for each layer
    with fake_replicas(REPLICAS) as begun:
        yield begun


def _step(layers: nn.Sequential, optimizer: ShardedAdamW, events: list[tuple[str, int]]) -> None:
    handles = [
        layer.register_full_backward_hook(lambda *_, number=number: events.append((f"backward of {number}", 0)))
        for number, layer in enumerate(layers)
    ]
    optimizer.last_backward(0)
    layers(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    optimizer.ran_backward(0)
    optimizer.reduce()
    optimizer.step(1e-3)
    optimizer.discard()
    for handle in handles:
        handle.remove()


def test_gradients_go_once_and_weights_once_while_the_backward_and_the_next_step_run(events: list[tuple[str, int]]) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = ShardedAdamW([list(layers.parameters())], dist.group.WORLD)
    events.clear()
    _step(layers, optimizer, events)
    names = [name for name, _ in events]
    assert names.count("reduce_scatter_single") == names.count("all_gather_single") == LAYERS
    assert names.index("reduce_scatter_single") < names.index("backward of 0"), "the last layer's, while the first one computes"
    assert names[-LAYERS:] == ["all_gather_single"] * LAYERS, "of which no one waits for the last one"
    sent = sum(num_bytes for name, num_bytes in events if name != "all_reduce")
    gradients = LAYERS * WIDTH * WIDTH * 4
    assert sent == 2 * (REPLICAS - 1) * gradients // REPLICAS
    (flags,) = [num_bytes for name, num_bytes in events if name == "all_reduce"]
    assert flags <= 2 * LAYERS


def test_moments_for_a_checkpoint_are_gathered_bucket_by_bucket(
    events: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four layers each, of which this replica writes the second; what was yielded is gone with the next one."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", REPLICAS * WIDTH * WIDTH)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS * REPLICAS)))
    optimizer = ShardedAdamW([list(layers.parameters())], dist.group.WORLD)
    _step(layers, optimizer, events)
    optimizer.wait()
    events.clear()
    written: list[nn.Parameter] = []
    former: list[weakref.ref[torch.Tensor]] = []
    for parameter, state in optimizer.state():
        written.append(parameter)
        assert len(events) == 2 * len(written), "no bucket is gathered before its turn"
        assert all(of() is None for of in former)
        former.append(weakref.ref(state["exp_avg"]._base))
    assert written == [layers[number].weight for number in (10, 6, 2)]


def test_a_layer_waits_for_its_own_weights_alone(events: list[tuple[str, int]]) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = ShardedAdamW([list(layers.parameters())], dist.group.WORLD)
    _step(layers, optimizer, events)
    wait = optimizer.waiting_for(layers[0].parameters())
    first = next(bucket for bucket in optimizer._buckets if layers[0].weight in set(bucket.parameters))
    wait()
    assert [bucket._gather is None for bucket in optimizer._buckets] == [bucket is first for bucket in optimizer._buckets]
    optimizer.wait()
    assert all(bucket._gather is None for bucket in optimizer._buckets)
