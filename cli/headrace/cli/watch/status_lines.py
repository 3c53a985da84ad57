"""One line for the state of each job, rank, node and preprocessor. Pure: the service's messages in, lines out.

`headrace top --plain` prints them, and the scripts in tests/golden expect them. A line begins with the kind and the name of what
it tells of, goes on with its state in a word, and then has NAME=VALUE pairs without spaces; a sentence follows a colon. It has no
control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headrace.jobs_client import state_name
from headrace.printable import printable
from headrace.rates import DecodingRate, Look, decoding_rates, samples_per_s
from headrace.snapshot import NOBODY, node_state, size_in_words
from headrace.v1.jobs_pb2 import JobStatus, NodeStatus, PreprocessorStatus, RankStatus
from headrace.v1.membership_pb2 import Snapshot


def status_lines(jobs: Sequence[Sequence[Look]]) -> Iterator[str]:
    """Yield the lines of a service from the looks at each of its jobs, the latest look last in each.

    Each job is followed by its ranks, its pipelines and its nodes. The leader comes first and the preprocessors last, both as the
    last job's status has them: a service without a job tells of neither.
    """
    if not jobs:
        yield "service without jobs"
        return
    latest = jobs[-1][-1].status
    yield f"service {printable(latest.leader)} leads term={latest.term} preprocessors={len(latest.preprocessors)}"
    for looks in jobs:
        status = looks[-1].status
        yield job_line(status, samples_per_s(looks))
        yield from (rank_line(status.job, rank) for rank in status.ranks)
        if status.HasField("snapshot"):
            yield pipelines_line(status.job, status.snapshot)
        yield from (node_line(status.job, node, status.snapshot) for node in _in_order(status))
    rates = decoding_rates(jobs[-1])
    yield from (preprocessor_line(member, rates) for member in sorted(latest.preprocessors, key=lambda it: it.preprocessor))


def job_line(status: JobStatus, samples_per_s: float = 0.0) -> str:
    """Return the line of a job. `samples_per_s`: samples that it has committed per second lately.

    `planned` counts the steps planned ahead, `shards` those whose samples are counted of those that there are.
    """
    line = (
        f"job {printable(status.job)} {state_name(status)} generation={status.generation} "
        f"steps={status.committed_steps}/{status.num_steps or '?'} planned={status.planned_steps} "
        f"samples={status.committed_samples} quarantined={status.quarantined_samples} "
        f"shards={status.indexed_shards}/{status.num_shards} rate={samples_per_s:.1f}/s"
    )
    return _with_sentence(line, status.message)


def rank_line(job: str, rank: RankStatus) -> str:
    """Return the line of a rank that has a session with `job`: `away` until it reads plans, and when it does not any more.

    `next` is the step that it commits next; `step` and `wait` are the seconds that its latest step took, and those of them in
    which it waited for data.
    """
    state = "connected" if rank.connected else "away"
    times = f"step={rank.step_s:.3f}s wait={rank.data_wait_s:.3f}s"
    return f"rank {printable(job)}/{rank.rank} {state} next={rank.committed_steps} {times}"


def pipelines_line(job: str, snapshot: Snapshot) -> str:
    """Return the line of the pipelines of a recoverable job, with the nodes and the microbatches of each.

    Brackets mark a pipeline that lacks a node: the others process its microbatches. The sentence says what the latest change was,
    or why there are no pipelines.
    """
    nodes = "+".join(map(size_in_words, snapshot.pipelines)) or "0"
    microbatches = "+".join(str(pipeline.num_microbatches) for pipeline in snapshot.pipelines) or "0"
    state = "formed" if snapshot.pipelines else "none"
    line = f"pipelines {printable(job)} {state} generation={snapshot.generation} nodes={nodes} microbatches={microbatches}"
    return _with_sentence(line, snapshot.error or snapshot.change)


def node_line(job: str, node: NodeStatus, snapshot: Snapshot) -> str:
    """Return the line of a node of a recoverable job. `snapshot`: the job's newest one.

    Its state is that of `node_state`. Pipelines and layers count from 0, the layers within their unit.
    """
    ranks = {member.name: rank for rank, member in enumerate(snapshot.nodes)}
    rank = ranks.get(node.node, NOBODY)
    places = [
        (number, f"{stage.unit}[{stage.first_layer}:{stage.end_layer}]")
        for number, pipeline in enumerate(snapshot.pipelines)
        for stage in pipeline.stages
        if stage.rank == rank != NOBODY
    ]
    where = "".join(f" pipeline={number} layers={layers}" for number, layers in places)
    return f"node {printable(job)}/{printable(node.node)} {node_state(node, snapshot)}{where}"


def preprocessor_line(member: PreprocessorStatus, rates: Mapping[str, DecodingRate] | None = None) -> str:
    """Return the line of a preprocessor. `rates`: by name, how fast each has decoded lately; None: that is not known.

    It is `silent` while it has had work for long without a report. `busy` counts its leases, and `[full]` says that they are as
    many as its slots; `late` counts those whose work others have now as well, `kept` the decoded parts that it holds.
    """
    state = "silent" if member.silent else "ready"
    full = "[full]" if member.leases + member.late >= member.slots else ""
    store = member.store_bytes / member.store_budget_bytes if member.store_budget_bytes else 0.0
    rate = rates[member.preprocessor].samples_per_s if rates is not None else 0.0
    return (
        f"preprocessor {printable(member.preprocessor)} {state} slots={member.slots} busy={member.leases}{full} "
        f"late={member.late} kept={member.kept} store={store:.0%} rate={rate:.1f}/s"
    )


def _in_order(status: JobStatus) -> list[NodeStatus]:
    """Return the nodes as the snapshot has them, and behind them those that are in no pipeline."""
    ranks = {node.name: rank for rank, node in enumerate(status.snapshot.nodes)}
    return sorted(status.nodes, key=lambda node: (ranks.get(node.node, len(ranks)), node.node))


def _with_sentence(line: str, sentence: str) -> str:
    return f"{line}: {printable(sentence)}" if sentence else line
