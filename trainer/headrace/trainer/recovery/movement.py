"""How nodes agree, after a change, on where training stands, and how each comes by the layers that it lacks.

Every node says what it has and what it needs; from that all of them make the same list of transfers. Nobody writes over what it
has until all transfers are done, so that a further loss in between costs nothing but time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import HeadraceError, UnrecoverableError
from headrace.trainer.recovery.mesh import Mesh

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a node stands. -1: nowhere."""

    applied: int = -1
    """Steps in its weights."""
    generation: int = -1
    """In which the last of them was voted on: a node that was away may have another version of the same step."""
    grad_norm: float = 0.0
    """Of that step."""
    awaited: int = -1
    """The generation in which it has asked for the vote on the next step, and not seen the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The state of a parameter from node to node, by ranks."""

    name: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all nodes know of each other."""

    standing: Standing
    """The furthest one of which nothing is lost: all nodes take it over. A node that was away may stand further, alone."""
    catches_up: bool
    """Whether this node has gradients of the last step, which the others have applied."""
    is_current: bool
    """Whether what it has counts, once it has caught up."""
    rejected: bytes
    """Samples of the last step, as `headrace.trainer.recovery.node_training` says them."""
    transfers: Sequence[Transfer]
    sources: Mapping[str, Sequence[int]]
    """Ranks that have each parameter of the model now, in the furthest version."""
    holders: Mapping[str, Sequence[int]]
    """Ranks that have each parameter of the model, once the transfers are done."""
    done: Sequence[frozenset[int]]
    """By rank: microbatches of the next step that it has gradients of."""


def agree(
    mesh: Mesh,
    sizes: Mapping[str, int],
    standing: Standing,
    has: Collection[str],
    needs: Collection[str],
    rejected: bytes,
    *,
    done: Collection[int] = (),
    num_microbatches: int = 0,
) -> Agreement:
    """sizes: of all parameters of the model, with the optimizer's state; rejected: samples of the last step in the weights;
    done: microbatches of the next one, of num_microbatches, that this node has gradients of.

    Raises UnrecoverableError, on all nodes, where nobody has what somebody needs, and MeshCutError.
    """
    names = list(sizes)
    said = [float(standing.applied), standing.generation, standing.grad_norm, standing.awaited, len(rejected)]
    masks = [float(name in some) for some in (has, needs) for name in names]
    own = torch.tensor([*said, *masks, *(float(number in done) for number in range(num_microbatches))], dtype=torch.float64)
    everybody = [torch.empty_like(own) for _ in range(mesh.num_ranks)]
    with mesh.interruptible():
        mesh.wait(mesh.everybody.allgather([everybody], [own]))
        messages = mesh.gather(rejected, [int(one[len(said) - 1]) for one in everybody])
    standings = [
        Standing(applied=int(a), generation=int(g), grad_norm=n, awaited=int(w))
        for a, g, n, w, _ in (one[: len(said)].tolist() for one in everybody)
    ]
    table = torch.stack(everybody)[:, len(said) :].bool()
    has_it, needs_it, has_done = (part.tolist() for part in torch.split(table, [len(names), len(names), num_microbatches], dim=1))

    def sources_of(version: Standing) -> dict[str, list[int]]:
        current = [r for r, one in enumerate(standings) if _is_current(one, version) or _waits_for(one, version)]
        return {name: [r for r in current if has_it[r][k]] for k, name in enumerate(names)}

    in_order = sorted(standings, key=lambda one: (one.applied, one.generation), reverse=True)
    furthest = next((one for one in in_order if all(sources_of(one).values())), in_order[0])
    sources = sources_of(furthest)
    wanted = {name: [r for r in range(mesh.num_ranks) if needs_it[r][k]] for k, name in enumerate(names)}
    transfers = plan_transfers(wanted, sources, sizes) if furthest.applied >= 0 else []
    return Agreement(
        standing=furthest,
        catches_up=_waits_for(standing, furthest),
        is_current=_is_current(standing, furthest) or _waits_for(standing, furthest),
        rejected=messages[standings.index(furthest)],
        transfers=transfers,
        sources=sources,
        holders=wanted,
        done=[
            frozenset(number for number, is_done in enumerate(of_rank) if is_done and _is_current(standings[rank], furthest))
            for rank, of_rank in enumerate(has_done)
        ],
    )


def _is_current(one: Standing, furthest: Standing) -> bool:
    return (one.applied, one.generation) == (furthest.applied, furthest.generation)


def _waits_for(one: Standing, furthest: Standing) -> bool:
    """Who has asked for the vote that others have seen the outcome of has all of the step's gradients."""
    return 0 <= one.applied == furthest.applied - 1 and one.awaited == furthest.generation


def plan_transfers(
    wanted: Mapping[str, Sequence[int]], holders: Mapping[str, Sequence[int]], sizes: Mapping[str, int]
) -> list[Transfer]:
    """To every node what it wants and does not hold, each from the holder that has the least to send so far; the largest first.

    Raises UnrecoverableError where nobody holds what somebody wants.
    """
    lost = [name for name, ranks in wanted.items() if ranks and not holders[name]]
    if lost:
        raise UnrecoverableError(
            f"no node is left that has {named(lost)}: bring back nodes that still have them, or go on from a checkpoint"
        )
    load: dict[int, int] = {}
    transfers = []
    for name in sorted(wanted, key=lambda name: -sizes[name]):
        for target in wanted[name]:
            if target not in holders[name]:
                source = min(holders[name], key=lambda rank: load.get(rank, 0))
                load[source] = load.get(source, 0) + sizes[name]
                transfers.append(Transfer(name=name, source=source, target=target))
    return transfers


def named(lost: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    return ", ".join(lost[:3]) + (f" and {len(lost) - 3} more of the model's parameters" if len(lost) > 3 else "")


def move(
    mesh: Mesh,
    sizes: Mapping[str, int],
    transfers: Iterable[Transfer],
    state: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Carry out the transfers; what this node received, verified, by parameter.

    state: of a parameter that this node holds, flat and float32. Raises MeshCutError, and HeadraceError where a parameter came
    damaged.
    """
    number = {name: tag for tag, name in enumerate(sizes)}
    under_way, arriving = [], {}
    with mesh.interruptible():
        for transfer in transfers:
            if transfer.target == mesh.rank:
                buffer = torch.empty(sizes[transfer.name] + _DIGEST_BYTES, dtype=torch.uint8)
                work = mesh.everybody.recv([buffer], transfer.source, number[transfer.name])
                arriving[transfer] = (work, buffer)
            elif transfer.source == mesh.rank:
                sealed = sealed_state(state(transfer.name))
                under_way.append((mesh.everybody.send([sealed], transfer.target, number[transfer.name]), sealed))
        for work, _ in [*arriving.values(), *under_way]:
            mesh.wait_for_message(work)
    return {transfer.name: opened_state(buffer, transfer) for transfer, (_, buffer) in arriving.items()}


def sealed_state(state: Tensor) -> Tensor:
    """What is sent of a parameter: its bytes, and behind them their digest."""
    content = state.cpu().view(torch.uint8)
    digest = torch.frombuffer(bytearray(_digest(content)), dtype=torch.uint8)
    return torch.cat([content, digest])


def opened_state(buffer: Tensor, transfer: Transfer) -> Tensor:
    """What came, float32. Raises HeadraceError where it is not what its digest says."""
    content, digest = buffer[:-_DIGEST_BYTES], buffer[-_DIGEST_BYTES:]
    if _digest(content) != bytes(digest.numpy()):
        raise HeadraceError(f"{transfer.name} came damaged from node {transfer.source}: it has another digest")
    return content.view(torch.float32)


def _digest(content: Tensor) -> bytes:
    return hashlib.blake2b(content.numpy().data, digest_size=_DIGEST_BYTES).digest()
