"""`headrace.trainer.connect`, which makes the step loader of one rank for any training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import UserError
from headrace.sample import UNIT_COLUMNS
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.group_loader import GroupLoader
from headrace.trainer.loading.hedging import HEDGE_S
from headrace.trainer.loading.loader import SessionLoader
from headrace.trainer.loading.parallel import Parallel
from headrace.trainer.loading.step_loader import StepLoader
from headrace.transport.base import TRANSPORTS

PREFETCH_PARTS, PREFETCH_BYTES, THREADS = 8, 256 << 20, 4
"""Defaults of `connect` for `prefetch_parts`, `prefetch_bytes` and `threads`."""


def connect(
    endpoint: str,
    *,
    job: str,
    rank: int = 0,
    num_ranks: int = 1,
    prefetch_parts: int = PREFETCH_PARTS,
    prefetch_bytes: int = PREFETCH_BYTES,
    threads: int = THREADS,
    transports: Sequence[str] = TRANSPORTS,
    token: str | None = None,
    tls: str | Path | None = None,
    unit: str | None = None,
    hedge_s: float = HEDGE_S,
    mesh: DeviceMesh | None = None,
    parallel: Parallel | None = None,
    equal_microbatches: bool = False,
) -> StepLoader:
    """Return a loader that iterates over the steps of `job` for one rank.

    Rank r of n gets the microbatches of replicas r, r + n, r + 2n, ...: `rank` and `num_ranks` are those of the data-parallel
    group. While a process is connected as a rank, another process is refused as that rank. Where some processes train on the
    same samples (tensor-, context- and pipeline-parallel ones), give `mesh` or `parallel` in place of `rank` and `num_ranks`, in
    all of them: one connects, and the others get its microbatches from it. It works in any training loop:

        with headrace.trainer.connect("127.0.0.1:7070", job="demo") as loader:
            for step in loader:
                for microbatch in step:
                    ...             # forward and backward on microbatch.data, gradients summed
                ...                 # optimizer step
                loader.commit(step, loss=loss)

    Tensors may be views of memory that is shared with a preprocessor: do not write into them, and copy what is needed after the
    step's `commit`. On hosts with a GPU, patches and mel lie in pinned memory. The next microbatch is packed ahead; in addition,
    up to `prefetch_parts` parts, and no more than about `prefetch_bytes`, are fetched ahead. No more than `threads` parts are
    requested from one preprocessor at a time.

    `endpoint`: HOST:PORT, or several of them, separated by commas, for reorder services on one store: the leader is found.

    `transports`: the allowed transports, of which the best one that a preprocessor supports is used. "shared_memory": in place,
    from preprocessors that share /dev/shm with this process; "ucx": by RDMA, or TCP without a fabric, from preprocessors started
    with --ucx and without TLS; "flight": over the network, by Arrow Flight. A preprocessor that supports none of those allowed
    is an error; parts for which the chosen transport has no room come by Flight all the same. The first use of Flight tunes this
    process's malloc (`headrace.transport.malloc`), so that it keeps the memory of parts for later ones; HEADRACE_KEEP_MALLOC=1
    in the environment prevents that.

    `token`: the cluster's token, if its services ask for one. None: HEADRACE_CLUSTER_TOKEN, or the content of the file that
    HEADRACE_CLUSTER_TOKEN_FILE names.

    `tls`: a folder with ca.crt, tls.crt and tls.key, this process's papers: every connection is over TLS then, and both sides
    show their certificates (`headrace certs` makes such folders). None: the folder that HEADRACE_TLS names, or plain text.
    Renewed files are used by the next connection.

    `unit`: the parallelism unit of this rank, "encoder", "vision", "audio", "llm" or "generator". The rank receives only the
    columns of its unit (an LLM rank no pixels, an encoder rank no labels); all other tensors are empty. None: every column.

    `hedge_s`: seconds for which the consumer waits for a part before another preprocessor is asked for it as well; whichever
    delivers first is used. Where parts usually take longer than a quarter of that, the deadline is four times as long as they
    take, so that a busy fleet is not given the work twice. `StepLoader.statistics` counts hedged parts.

    `mesh`: the device mesh with named dimensions (`Parallel.of_mesh`); `parallel`: the same said by hand, with padding and the
    order of context-parallel slices. Every process of a group then opens the loader, takes steps and microbatches and commits
    alike, as each of these is a collective of the group; an error of the one that is connected is raised in all.

    `equal_microbatches`: every rank has as many microbatches in a step as the rank that has most, empty ones behind its own.

    Raises UserError for an invalid option. The loader raises EndpointError, NotFoundError or ConflictError when it is opened, at
    `with` or at the first step.
    """
    if mesh is not None:
        if parallel is not None:
            raise UserError("mesh and parallel both say where this process is: give one of them")
        parallel = Parallel.of_mesh(mesh)
    if parallel is not None:
        if (rank, num_ranks) != (0, 1):
            raise UserError(f"rank={rank} and num_ranks={num_ranks} beside mesh or parallel, which say them: leave them out")
        rank, num_ranks = parallel.dp_rank, parallel.dp_size
    one_rank = _of_any_job(
        endpoint,
        rank=rank,
        num_ranks=num_ranks,
        prefetch_parts=prefetch_parts,
        prefetch_bytes=prefetch_bytes,
        threads=threads,
        transports=transports,
        token=token,
        tls=tls,
        columns=_columns(unit),
        hedge_s=hedge_s,
        equal_microbatches=equal_microbatches,
    )
    if parallel is None or (parallel.group is None and parallel.pad_to == 1):
        return one_rank(job)
    return GroupLoader(job, parallel, lambda buffers: one_rank(job, buffers))


def _of_any_job(endpoint: str, **options: Any) -> Callable[..., SessionLoader]:
    """Return a function that makes the loader of a job with these options, and with a pool to pack into if one is given."""

    def of_job(job: str, buffers: BufferPool | None = None) -> SessionLoader:
        return SessionLoader(endpoint, job=job, of_job=of_job, buffers=buffers, **options)

    return of_job


def _columns(unit: str | None) -> tuple[str, ...] | None:
    """Return the columns that a rank of `unit` receives; None: all of them. Raises UserError for an unknown unit."""
    if unit is not None and unit not in UNIT_COLUMNS:
        raise UserError(f"unit {unit!r} must be one of {', '.join(UNIT_COLUMNS)}, or None for a rank that needs every column")
    return UNIT_COLUMNS[unit] if unit is not None else None
