"""`headrace.trainer.connect`: a step loader for one rank of anyone's training loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.errors import UserError
from headrace.sample import UNIT_COLUMNS
from headrace.trainer.loading.hedging import HEDGE_S
from headrace.trainer.loading.loader import StepLoader
from headrace.transport.base import TRANSPORTS
from headrace.transport.tls import load_ca

PREFETCH_PARTS, PREFETCH_BYTES, THREADS = 8, 256 << 20, 4
"""Defaults of `connect`."""


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
    tls_ca: str | Path | None = None,
    token: str | None = None,
    unit: str | None = None,
    hedge_s: float = HEDGE_S,
    catch_up: int = 1,
) -> StepLoader:
    """A loader of the steps of `job` for one rank.

    Rank r of n gets the microbatches of replicas r, r + n, r + 2n, ...: `rank` and `num_ranks` are those of the data-parallel
    group. Ranks that train on the same samples (tensor-, context- or pipeline-parallel ones) connect once: one of them takes the
    microbatches and broadcasts them. While a process is connected as a rank, another one is refused. Use it from any training
    loop:

        with headrace.trainer.connect("127.0.0.1:7070", job="demo") as loader:
            for step in loader:
                for microbatch in step:
                    ...             # forward and backward on microbatch.data, gradients summed
                ...                 # optimizer step
                loader.commit(step, loss=loss)

    Tensors may be views of memory that is shared with a preprocessor: do not write into them, and copy what is needed after the
    step's `commit`. Where a GPU is, patches and mel lie in pinned memory. The next microbatch is packed ahead; beside it up to
    `prefetch_parts` parts, and no more than about `prefetch_bytes`, lie ready. No more than `threads` parts are asked of one
    preprocessor at a time.

    `endpoint`: HOST:PORT, or several of reorder services on one store, separated by commas: the one that leads is found.

    `transports`: how parts may come, the best one that is possible with a preprocessor is taken. "shared_memory": in place, from
    preprocessors that share /dev/shm with this process; "flight": over the network, by Arrow Flight. Without "flight" a
    preprocessor that shares no memory is an error; parts for which its shared memory has no room come over the network all the
    same. The first part over the network tunes this process's malloc (`headrace.transport.malloc`), so that it keeps the memory
    of parts for those to come; HEADRACE_KEEP_MALLOC=1 in the environment leaves it alone.

    `tls_ca`: a file in PEM, the CA of the preprocessors' certificates; they were started with --tls-cert. None: no TLS.

    `token`: of the cluster, where its services ask for one. None: HEADRACE_CLUSTER_TOKEN, or what is in the file that
    HEADRACE_CLUSTER_TOKEN_FILE names.

    `unit`: the parallelism unit of this rank, "encoder", "vision", "audio", "llm" or "generator", which receives its columns
    only: an LLM rank no pixels, an encoder rank no labels. The tensors of the others are empty. None: everything.

    `hedge_s`: seconds for which the consumer waits for a part until another preprocessor is asked for it as well, and whichever
    comes first is taken. Where parts usually take longer than a quarter of that, the deadline is four times as long as they
    take, so that a busy fleet is not given the work twice. `StepLoader.statistics` counts it.

    `catch_up`: by how many steps a state that is loaded may be ahead of the job's last commit, as where its store has lost some:
    the loader commits those again, without handing them out. All ranks have to bring the same state.

    Raises UserError where an option has a value that is none; EndpointError, NotFoundError or ConflictError when it is opened,
    at `with` or at the first step.
    """
    return StepLoader(
        endpoint,
        job=job,
        rank=rank,
        num_ranks=num_ranks,
        prefetch_parts=prefetch_parts,
        prefetch_bytes=prefetch_bytes,
        threads=threads,
        transports=transports,
        tls_ca=load_ca(Path(tls_ca)) if tls_ca is not None else None,
        token=token,
        columns=_columns(unit),
        hedge_s=hedge_s,
        catch_up=catch_up,
    )


def _columns(unit: str | None) -> tuple[str, ...] | None:
    """What a rank of that unit receives; None: everything."""
    if unit is not None and unit not in UNIT_COLUMNS:
        raise UserError(f"unit {unit!r} must be one of {', '.join(UNIT_COLUMNS)}, or None for a rank that needs every column")
    return UNIT_COLUMNS[unit] if unit is not None else None
