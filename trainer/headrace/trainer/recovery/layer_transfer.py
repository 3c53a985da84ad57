"""How nodes agree after a change on how far training has come, and how each one gets the layers that it lacks.

Every node says what it has and what it needs, and from that all of them make the same list of transfers. No node overwrites
what it has until all transfers are done, so that a further loss in between costs only time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import torch
import xxhash
from torch import Tensor

from headrace.errors import HeadraceError, UnrecoverableError
from headrace.trainer.pipeline.huge_pages import empty_in_huge_pages
from headrace.trainer.recovery.host_staging import from_host, host_memory_for, to_host
from headrace.trainer.recovery.mesh import Mesh
from headrace.trainer.recovery.state_streams import Stream

CHUNK_BYTES = 1 << 20
"""How much is received, and digested while it is in the processor's cache, or copied to or from a device, at once."""
_HOST = torch.device("cpu")

new_digest = xxhash.xxh3_128
"""The digest of a parameter's state: 128 bits of XXH3, which finds damage, not forgery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a node's training has come. -1 means none yet."""

    applied: int = -1
    """Number of steps applied to the node's weights; -1 if it has no weights."""
    generation: int = -1
    """Generation in which the last applied step was voted on: a node that was away may have another version of the same step."""
    grad_norm: float = 0.0
    """Gradient norm of the last applied step."""
    vote_pending_generation: int = -1
    """Generation in which the node asked for the vote on the next step without seeing its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A transfer of one parameter's state from rank `source` to rank `target`."""

    name: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of `agree`: the standing to continue from, what this node has to do for it, and what other nodes have."""

    standing: Standing
    """The furthest standing of which no parameter is lost, which all nodes adopt; the furthest of all if each has lost some.

    A node that was away may stand further, alone.
    """
    catches_up: bool
    """Whether this node still has to apply the last step, which others have applied and whose gradients it has."""
    is_current: bool
    """Whether this node's weights are those of `standing`, once it has caught up."""
    report: bytes
    """What nodes have to say of the last step in its commit, as encoded by `headrace.trainer.recovery.node_training`."""
    transfers: Sequence[Transfer]
    sources: Mapping[str, Sequence[int]]
    """Ranks that have each parameter of the model now, in the version of `standing`."""
    holders: Mapping[str, Sequence[int]]
    """Ranks that have each parameter of the model once the transfers are done."""
    formation: int
    """Generation of the pipelines for which the plan of the next step was made whose microbatches are `done`; 0 where none is."""
    done: Sequence[frozenset[int]]
    """Microbatches of the next step that each rank has gradients of.

    Empty for a rank that has not applied all of `standing`, or has followed a plan for earlier pipelines than `formation`.
    """


def agree(
    mesh: Mesh,
    sizes: Mapping[str, int],
    standing: Standing,
    has: Collection[str],
    needs: Collection[str],
    report: bytes,
    *,
    done: Collection[int] = (),
    formation: int = 0,
    num_microbatches: int = 0,
) -> Agreement:
    """Agree with all nodes of the mesh on the standing to continue from, and on the transfers that give each what it needs.

    sizes: bytes of every parameter of the model with its optimizer state. standing: this node's. has, needs: names of parameters.
    report: encoded report of the last applied step. done: microbatches of the next step, out of num_microbatches,
    that this node has gradients of. formation: generation of the pipelines for which their plan was made.

    Raises UnrecoverableError, on all nodes, if no node has a parameter that some node needs, and MeshCutError.
    """
    names = list(sizes)
    said = [
        float(standing.applied),
        standing.generation,
        standing.grad_norm,
        standing.vote_pending_generation,
        formation if done else 0,
        len(report),
    ]
    masks = [float(name in some) for some in (has, needs) for name in names]
    own = torch.tensor([*said, *masks, *(float(number in done) for number in range(num_microbatches))], dtype=torch.float64)
    everybody = [torch.empty_like(own) for _ in range(mesh.num_ranks)]
    with mesh.interruptible():
        mesh.wait(mesh.everybody.allgather([everybody], [own]))
        messages = mesh.gather(report, [int(one[len(said) - 1]) for one in everybody])
    standings = [
        Standing(applied=int(a), generation=int(g), grad_norm=n, vote_pending_generation=int(w))
        for a, g, n, w, _, _ in (one[: len(said)].tolist() for one in everybody)
    ]
    table = torch.stack(everybody)[:, len(said) :].bool()
    has_it, needs_it, has_done = (part.tolist() for part in torch.split(table, [len(names), len(names), num_microbatches], dim=1))

    def sources_of(version: Standing) -> dict[str, list[int]]:
        current = [r for r, one in enumerate(standings) if _is_current(one, version) or _waits_for(one, version)]
        return {name: [r for r in current if has_it[r][k]] for k, name in enumerate(names)}

    in_order = sorted(standings, key=lambda one: (one.applied, one.generation), reverse=True)
    furthest = next((one for one in in_order if all(sources_of(one).values())), in_order[0])
    sources = sources_of(furthest)
    formations = [int(one[len(said) - 2]) if _is_current(standings[r], furthest) else 0 for r, one in enumerate(everybody)]
    wanted = {name: [r for r in range(mesh.num_ranks) if needs_it[r][k]] for k, name in enumerate(names)}
    transfers = plan_transfers(wanted, sources, sizes) if furthest.applied >= 0 else []
    return Agreement(
        standing=furthest,
        catches_up=_waits_for(standing, furthest),
        is_current=_is_current(standing, furthest) or _waits_for(standing, furthest),
        report=messages[standings.index(furthest)],
        transfers=transfers,
        sources=sources,
        holders=wanted,
        formation=max(formations),
        done=[
            frozenset(number for number, is_done in enumerate(of_rank) if is_done and formations[rank] == max(formations) > 0)
            for rank, of_rank in enumerate(has_done)
        ],
    )


def _is_current(one: Standing, furthest: Standing) -> bool:
    return (one.applied, one.generation) == (furthest.applied, furthest.generation)


def _waits_for(one: Standing, furthest: Standing) -> bool:
    """Whether a node asked for the vote whose outcome others have seen: it then has all gradients of that step."""
    return 0 <= one.applied == furthest.applied - 1 and one.vote_pending_generation == furthest.generation


def plan_transfers(
    wanted: Mapping[str, Sequence[int]], holders: Mapping[str, Sequence[int]], sizes: Mapping[str, int]
) -> list[Transfer]:
    """Plan the transfers that bring every node the parameters that it wants and does not hold.

    The largest parameters are planned first, each transfer from the holder that has the fewest bytes to send so far.

    Raises UnrecoverableError if no node holds a parameter that some node wants.
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
    """Return the first three parameter names, and how many more there are, for an error message."""
    return ", ".join(lost[:3]) + (f" and {len(lost) - 3} more of the model's parameters" if len(lost) > 3 else "")


def move(
    mesh: Mesh,
    lengths: Mapping[str, Sequence[int]],
    transfers: Iterable[Transfer],
    state: Callable[[str], Sequence[Tensor]],
    *,
    device: torch.device = _HOST,
) -> dict[str, list[Tensor]]:
    """Carry out the transfers, and return the verified states that this node received, by parameter name, on `device`.

    lengths: elements of each tensor of every parameter's state. state: returns these tensors, flat and float32, of a parameter
    that this node holds; they are sent from where they are. It is called from several threads.

    Raises MeshCutError, and HeadraceError if a parameter arrived damaged.
    """
    leaving: dict[int, list[str]] = {}
    arriving: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        if transfer.source == mesh.rank:
            leaving.setdefault(transfer.target, []).append(transfer.name)
        elif transfer.target == mesh.rank:
            arriving.setdefault(transfer.source, []).append(transfer)
    if not leaving and not arriving:
        return {}
    received = {
        transfer.name: [empty_in_huge_pages(length, device) for length in lengths[transfer.name]]
        for of_source in arriving.values()
        for transfer in of_source
    }

    def send(target: int) -> None:
        for name in leaving[target]:
            send_state(streams.to[target], state(name))

    def receive(source: int) -> None:
        for transfer in arriving[source]:
            receive_state(streams.of[source], received[transfer.name], transfer)

    works: list[Callable[[], None]] = [partial(receive, source) for source in arriving]
    works += [partial(send, target) for target in leaving]
    own, *others = works
    with (
        mesh.interruptible(),
        mesh.streams(leaving, arriving) as streams,
        ThreadPoolExecutor(len(others) or 1, thread_name_prefix="state") as pool,
    ):
        try:
            beside = [pool.submit(other) for other in others]
            own()  # a stream alone is faster without another thread
            for work in as_completed(beside):
                work.result()
        except BaseException:
            streams.end()  # so that no thread waits
            raise
    return received


def send_state(stream: Stream, parts: Iterable[Tensor]) -> None:
    """Send the tensors of a parameter's state, with their digest behind them."""
    digest = new_digest()
    for piece in _pieces(parts):
        for chunk in _chunks(to_host(piece)):
            digest.update(chunk)
            stream.send(chunk)
    stream.send(digest.digest())


def receive_state(stream: Stream, parts: Iterable[Tensor], transfer: Transfer) -> None:
    """Receive what `send_state` has sent into tensors. Raises HeadraceError if it has another digest than was sent with it."""
    digest = new_digest()
    for piece in _pieces(parts):
        host = host_memory_for(piece)
        for chunk in _chunks(host):
            stream.receive(chunk)
            digest.update(chunk)
        from_host(host, piece)
    expected = bytearray(digest.digest_size)
    stream.receive(memoryview(expected))
    if digest.digest() != expected:
        raise HeadraceError(f"{transfer.name} came damaged from node {transfer.source}: it has another digest")


def _pieces(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield what is in the host's memory at once: a chunk of a tensor on a device, and all of one that is there already."""
    for part in parts:
        yield from (part,) if part.device.type == "cpu" else torch.split(part, CHUNK_BYTES // part.itemsize)


def _chunks(host: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor. It does little between them: each has evicted from the caches what that takes."""
    data = host.view(torch.uint8).numpy().data
    for begin in range(0, len(data), CHUNK_BYTES):
        yield data[begin : begin + CHUNK_BYTES]
