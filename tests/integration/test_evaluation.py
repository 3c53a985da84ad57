"""Validation sets: an evaluation has each of their samples once over all ranks, beside the training and not in its ledger."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace import trainer
from headrace.cli.example import example_data
from headrace.errors import ConflictError, NotFoundError, UserError
from headrace.jobs import Jobs, JobState
from headrace.ledger import ledger_sha256
from headrace.processes import Process
from headrace.spec import JobSpec, parse_spec
from headrace.trainer.train import train
from headrace.validation_spec import evaluation_of
from tests.integration import trainers
from tests.integration.conftest import Cluster

pytestmark = pytest.mark.integration

SIZES = {"questions": 21, "answers": 16}
"""Samples of two small data sets: together two global batches, and five samples more."""
MakeSpec = Callable[..., JobSpec]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> MakeSpec:
    folder = tmp_path_factory.mktemp("sets")
    for name, size in SIZES.items():
        lines = [json.dumps({"text": f"{name} number {number} " * (1 + number % 5)}) for number in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return partial(make_spec, *({"path": str(folder / f"{name}.jsonl")} for name in SIZES))


def make_spec(questions: dict[str, str], answers: dict[str, str], name: str, **fields: Any) -> JobSpec:
    document: dict[str, Any] = {
        "name": name,
        "sources": [{"path": str(example_data())}],
        "validation": {"answers": {"sources": [answers]}, "both": {"sources": [questions, answers]}},
        "global_batch": 16,
        "steps": 2,
        "topology": {"replicas": 2, "microbatches": 2},
        "image": {"max_pixels": 112 * 112},
    }
    return parse_spec(document | fields)


def rank_of(cluster: Cluster, job: str, rank: int) -> list[list[int]]:
    """Train and evaluate as one of two ranks; the samples of each step of an evaluation, by their ids."""
    passes: list[list[list[int]]] = []
    with trainer.connect(cluster.endpoint, job=job, rank=rank, num_ranks=2) as loader:

        def evaluate() -> None:
            steps = loader.evaluate("both")
            passes.append([[i for microbatch in step for i in microbatch.data.sample_ids.tolist()] for step in steps])

        evaluate()
        for step in loader:
            list(step)
            loader.commit(step)
            evaluate()
    assert passes[0] == passes[1] == passes[2], "every pass is the same"
    return passes[0]


def test_all_ranks_together_have_each_sample_once_in_order_and_training_does_not_notice(calm: Cluster, spec: MakeSpec) -> None:
    job, plain = calm.submit(spec("evaluated")), calm.submit(spec("not-evaluated", validation={}))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: rank_of(calm, job, rank), (0, 1))
        list(pool.map(lambda rank: calm.consume(plain, rank=rank, num_ranks=2), (0, 1)))
    together = [sorted(a + b) for a, b in zip(first, second, strict=True)]
    assert [sample for step in together for sample in step] == list(range(37))
    assert [len(step) for step in together] == [16, 16, 5], "the last step has what is left"
    of_set = evaluation_of(spec("evaluated"), "both").name
    counts = Counter(sample for entry in calm.ledger(of_set) for sample in entry.samples)
    assert (len(counts), max(counts.values())) == (37, 1)
    assert ledger_sha256(calm.ledger(job)) == ledger_sha256(calm.ledger(plain))
    with Jobs(calm.endpoint) as jobs:
        assert jobs.show(of_set).state == JobState.DONE
        passes = [status.job for status in jobs.list() if status.job.startswith("evaluated.")]
        assert passes == [of_set], "all passes are one job"


def test_an_evaluation_that_was_broken_off_begins_anew_and_ends_with_its_job(calm: Cluster, spec: MakeSpec) -> None:
    broken_off = spec("broken-off", topology={"replicas": 1, "microbatches": 2})
    job, of_set = calm.submit(broken_off), evaluation_of(broken_off, "both").name
    for _ in range(2):
        with trainer.connect(calm.endpoint, job=job) as loader:
            for number, step in enumerate(loader.evaluate("both")):
                assert step.index == number
                list(step)
                if number == 1:
                    break
    with Jobs(calm.endpoint) as jobs:
        assert jobs.show(of_set).committed_steps == 1
        jobs.cancel(job)
        assert jobs.show(of_set).state == JobState.CANCELLED
        jobs.delete(job)
        with pytest.raises(NotFoundError):
            jobs.show(of_set)


def test_what_is_wrong_with_a_set_is_said(calm: Cluster, spec: MakeSpec, tmp_path: Path) -> None:
    damaged = tmp_path / "texts.jsonl"
    damaged.write_text('{"text": "good"}\n{"images": ["nowhere.png"], "text": "bad"}\n')
    sets = {"gone": {"sources": [{"path": str(tmp_path / "gone")}]}, "damaged": {"sources": [{"path": str(damaged)}]}}
    wrong = spec("wrong", validation=sets, topology={"replicas": 1, "microbatches": 2})
    job = calm.submit(wrong)
    with trainer.connect(calm.endpoint, job=job) as loader:
        with pytest.raises(UserError, match=r"job 'wrong' has no validation set 'texts': it has gone, damaged"):
            list(loader.evaluate("texts"))
        with pytest.raises(ConflictError, match=r"ended before it began: source 'gone': .*gone does not exist"):
            list(loader.evaluate("gone"))
        assert [[m.data.sample_ids.tolist() for m in step] for step in loader.evaluate("damaged")] in ([[[0]]], [[[0], []]])
        with calm.client() as client:
            (refused,) = client.quarantine(evaluation_of(wrong, "damaged").name)
            assert refused.name == "texts.jsonl/texts.jsonl/1"
            assert client.quarantine(job) == []
        with pytest.raises(ConflictError, match="before all of its microbatches were consumed"):
            list(loader.evaluate("damaged"))


@pytest.fixture(scope="module")
def of_one_rank(calm: Cluster, spec: MakeSpec) -> list[tuple[str, ...]]:
    """What our trainer says of its evaluations, as one rank."""
    job = calm.submit(spec("one-rank", topology={"replicas": 1, "microbatches": 4}))
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("headrace.trainer.evaluation.log.info", lambda form, *values: lines.append(form % values))
        train(calm.endpoint, job=job, evaluate_every=2, threads=1)
    return reported("\n".join(lines))


def reported(log: str) -> list[tuple[str, ...]]:
    """Set, number of steps before it, loss and targets of every evaluation that a process says it has made."""
    found = re.findall(r"evaluated .*set=(\S+) after_steps=(\d+) loss=(\S+) targets=(\d+)", log)
    return [(name, steps, f"{float(loss):.3f}", targets) for name, steps, loss, targets in found]


def test_our_trainer_reports_a_loss_for_each_set(of_one_rank: list[tuple[str, ...]]) -> None:
    evaluated = [(name, steps) for name, steps, *_ in of_one_rank]
    assert evaluated == [("answers", "0"), ("both", "0"), ("answers", "2"), ("both", "2")]
    first, last = (float(loss) for name, _, loss, _ in of_one_rank if name == "answers")
    assert abs(last - first) > 0.05, "it has learnt meanwhile"


@pytest.mark.slow
@pytest.mark.parametrize("llm", [{"dp": 2, "pp": 2}, {"cp": 2, "pp": 2}], ids=["replicas", "shared-sequences"])
def test_a_pipeline_reports_the_same(
    of_one_rank: list[tuple[str, ...]], calm: Cluster, spec: MakeSpec, tmp_path: Path, llm: dict[str, int]
) -> None:
    name, replicas = f"of-a-pipeline-{'-'.join(llm)}", llm.get("dp", 1)
    topology = {"replicas": replicas, "microbatches": 4 // replicas, "stages": {"encoder": 1, "llm": 2}}
    job = calm.submit(spec(name, topology=topology))
    processes = trainers.start(calm.group, calm, job, tmp_path, {"encoder": {}, "llm": llm}, 5, 5, "--evaluate-every", "2")
    assert trainers.wait(processes) == [0] * 5, processes[0].last_words()
    assert reported(processes[0].log.read_text()) == of_one_rank
    assert ledger_sha256(calm.ledger(name)) == ledger_sha256(calm.ledger("one-rank"))


@pytest.mark.slow
def test_nodes_report_the_same(of_one_rank: list[tuple[str, ...]], calm: Cluster, spec: MakeSpec, tmp_path: Path) -> None:
    """Also where one of them is taken for lost, as on a busy machine: the others then evaluate anew."""
    job = calm.submit(spec("of-nodes", topology={"replicas": 1, "microbatches": 4, "stages": {"encoder": 1, "llm": 1}}))
    (tmp_path / "nodes.yaml").write_text(json.dumps({"nodes": 5, "max_failures": 1, "units": {"encoder": {}, "llm": {}}}))
    arguments = ["train", "--endpoint", calm.endpoint, "--job", job, "--threads", "1", "--evaluate-every", "2"]
    arguments += ["--nodes", str(tmp_path / "nodes.yaml")]
    nodes = [calm.group.add(Process(name, [*arguments, "--node", name], tmp_path / f"{name}.log")) for name in "abcde"]
    assert trainers.wait(nodes) == [0] * 5, nodes[0].last_words()
    assert {one for node in nodes for one in reported(node.log.read_text())} == set(of_one_rank)
    assert ledger_sha256(calm.ledger("of-nodes")) == ledger_sha256(calm.ledger("one-rank"))
