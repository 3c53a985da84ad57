"""Who holds the optimizer's state of which parameter, and the optimizer of a process that is alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.pipeline.zero1 import ShardedAdamW, owners
from headrace.trainer.train_step import make_optimizer

LARGEST = 10_000


@given(st.lists(st.integers(1, LARGEST), max_size=40), st.integers(1, 9), st.integers(1, 4))
def test_every_parameter_has_its_owners_and_replicas_differ_by_one_parameter_at_most(
    sizes: list[int], num_replicas: int, copies: int
) -> None:
    chosen = owners(sizes, num_replicas, copies)
    load = [sum(size for size, some in zip(sizes, chosen, strict=True) if replica in some) for replica in range(num_replicas)]
    assert all(len(set(some)) == len(some) == min(copies, num_replicas) for some in chosen)
    assert max(load) - min(load) <= max(sizes, default=0)
    assert chosen == owners(sizes, num_replicas, copies)


def test_of_one_replica_it_is_adamw() -> None:
    sharded, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(sharded.state_dict())
    optimizer, expected = ShardedAdamW(list(sharded.parameters()), None), make_optimizer(plain.parameters())
    for options in expected.param_groups:
        options["lr"] = 0.1
    for _ in range(3):
        for model in (sharded, plain):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
        optimizer.step(0.1)
        expected.step()
    assert all(torch.equal(one, other) for one, other in zip(sharded.parameters(), plain.parameters(), strict=True))


def test_what_has_no_gradient_stays_as_it_is() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = ShardedAdamW(list(model.parameters()), None)
    model.bias.grad = torch.ones(2)
    optimizer.step(0.1)
    assert torch.equal(model.weight, before)
    assert not optimizer.state(model.weight)
