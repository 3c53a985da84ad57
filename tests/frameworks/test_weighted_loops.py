"""Weights of targets in loops of other libraries: the loss is the weighted mean over all targets of the global batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from headrace import trainer
from headrace.errors import UserError
from tests.frameworks.conftest import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MICROBATCHES = 2
WEIGHTS = (0.25, 1.0, 3.0)


@pytest.fixture
def submit(calm: Any, spec: Any, tmp_path: Path) -> Any:
    """Submits a job by its name: one step of chats whose answers have weights, which are a validation set, too."""
    lines = []
    for number in range(8):
        answer = {"role": "assistant", "content": f"It is {number} times {number}.", "weight": WEIGHTS[number % 3]}
        lines.append(json.dumps({"messages": [{"role": "user", "content": f"What is {number * number}?"}, answer]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    source = {"path": str(tmp_path / "chats.jsonl"), "mapping": {"weights": True}}
    sets = {"chats": {"sources": [source]}}
    shape = {"sources": [source], "validation": sets, "steps": 1, "global_batch": 8, "text": {"max_tokens": 256}}
    return lambda name: calm.submit(spec(name, topology={"replicas": 1, "microbatches": MICROBATCHES}, **shape))


def test_the_trainer_of_hugging_face_takes_the_weighted_mean(calm: Any, submit: Any, tmp_path: Path) -> None:
    needs("accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from headrace.trainer.integrations.huggingface_trainer import HeadraceTrainer

    with trainer.connect(calm.endpoint, job=submit("weighted-huggingface-alone")) as loader:
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=loader.open().vocabulary.size, **shape))
        total, weight = 0.0, 0.0
        for step in loader:
            for microbatch in step:
                data = microbatch.data
                with torch.no_grad():
                    logits = model(data.input_ids[None], position_ids=data.position_ids[None], use_cache=False).logits[0]
                losses = functional.cross_entropy(logits, data.labels, reduction="none")
                total += float((losses * data.target_weights).sum())
                weight += float(data.target_weights.sum())
            assert step.target_weight == pytest.approx(weight)
            assert step.num_targets != pytest.approx(weight)
            loader.commit(step, loss=total / weight)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=1,
        gradient_accumulation_steps=MICROBATCHES,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    with trainer.connect(calm.endpoint, job=submit("weighted-huggingface"), equal_microbatches=True) as loader:
        training = HeadraceTrainer(model=model, args=args, loader=loader)
        assert training.evaluate()["eval_loss"] == pytest.approx(total / weight, rel=1e-4)
        training.train()
    found = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert found == [pytest.approx(total / weight, rel=1e-4)]


@pytest.mark.filterwarnings("ignore")  # Megatron and what it imports warn of much
def test_masks_of_megatron_make_the_weighted_mean(calm: Any, submit: Any) -> None:
    """Of made-up losses, each of which is its label."""
    needs("megatron")
    from megatron.core import parallel_state

    from headrace.trainer.integrations.megatron_batches import MegatronBatches, masked_loss

    total, weight = 0.0, 0.0
    with trainer.connect(calm.endpoint, job=submit("weighted-megatron-alone")) as loader:
        for step in loader:
            for microbatch in step:
                total += float((microbatch.data.labels.clamp(min=0) * microbatch.data.target_weights).sum())
                weight += float(microbatch.data.target_weights.sum())
            loader.commit(step, loss=0.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        for padded in (False, True):
            batches = MegatronBatches(calm.endpoint, job=submit(f"weighted-megatron-{padded}"), padded=padded)
            trained = [next(batches) for _ in range(MICROBATCHES)]
            assert trained[0]["loss_mask"].shape == trained[0]["labels"].shape
            for got in (trained, batches.evaluate("chats")):
                sums = torch.stack([masked_loss(batch["loss_mask"], batch["labels"])[2]["lm loss"] for batch in got]).sum(0)
                assert float(sums[0] / sums[1]) == pytest.approx(total / weight, rel=1e-5)
            batches.close()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_inputs_that_leave_weights_out_are_refused(calm: Any, submit: Any) -> None:
    from headrace.trainer.integrations.model_inputs import packed_inputs

    with trainer.connect(calm.endpoint, job=submit("weighted-refused")) as loader:
        microbatch = next(iter(next(iter(loader))))
        with pytest.raises(UserError, match=r"weights=True"):
            packed_inputs(microbatch.data, loader.vocabulary)
