"""Validation sets of a job in the evaluations of other libraries: their losses are those of the samples one by one, whatever they
are packed with, and the training's ledger does not know of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from headrace import trainer
from headrace.errors import UserError
from headrace.ledger import ledger_sha256
from tests.frameworks.conftest import needs

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, MICROBATCHES = 4, 2
SIZES = {"short": 5, "long": 9}
"""Samples of the sets, by their names: in global batches of four the last one has one sample, and a microbatch without any."""


class Sets:
    """A job of texts with validation sets of other texts, and what is compared with what a library makes of it."""

    def __init__(self, calm: Any, spec: Any, folder: Path) -> None:
        self._calm, self._spec, self._folder = calm, spec, folder
        for name, size in {**SIZES, "trained": STEPS * 4}.items():
            lines = [{"text": f"{name} number {number} " * (1 + number * len(name) % 7)} for number in range(size)]
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def _source(self, name: str) -> dict[str, Any]:
        return {"path": str(self._folder / f"{name}.jsonl")}

    def _submit(self, job: str, source: str, **fields: Any) -> str:
        return str(self._calm.submit(self._spec(job, sources=[self._source(source)], text={"max_tokens": 256}, **fields)))

    def training(self, job: str, *sets: str) -> str:
        """Submit the job that trains, with some of the sets."""
        validation = {name: {"sources": [self._source(name)]} for name in sets}
        topology = {"replicas": 1, "microbatches": MICROBATCHES}
        return self._submit(job, "trained", steps=STEPS, global_batch=4, topology=topology, validation=validation)

    def loss(self, model: torch.nn.Module, name: str, job: str) -> float:
        """The mean over all targets of a set, each sample of which is a batch of its own. `job`: the name of one to read it."""
        loss_sum, targets = 0.0, 0
        topology = {"replicas": 1, "microbatches": 1}
        read = self._submit(f"{job}-{name}-alone", name, steps=SIZES[name], global_batch=1, topology=topology)
        with trainer.connect(self._calm.endpoint, job=read) as loader, torch.no_grad():
            for step in loader:
                for microbatch in step:
                    data = microbatch.data
                    logits = model(data.input_ids[None], use_cache=False).logits[0]
                    loss_sum += float(functional.cross_entropy(logits, data.labels, reduction="sum"))
                    targets += data.num_targets
                loader.commit(step)
        return loss_sum / targets

    def trains_as_without(self, job: str) -> bool:
        """Whether the ledger of a job is that of one without sets."""
        plain = self.training(f"{job}-plain")
        self._calm.consume(plain)
        return bool(ledger_sha256(self._calm.ledger(job)) == ledger_sha256(self._calm.ledger(plain)))

    @property
    def endpoint(self) -> str:
        return str(self._calm.endpoint)


@pytest.fixture
def sets(calm: Any, spec: Any, tmp_path: Path) -> Sets:
    return Sets(calm, spec, tmp_path)


def small_llama(loader: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=loader.open().vocabulary.size, **shape))


@pytest.mark.parametrize("names", [["short"], ["short", "long"]], ids=len)
def test_the_trainer_of_hugging_face_evaluates_every_set_of_the_job(sets: Sets, tmp_path: Path, names: list[str]) -> None:
    needs("accelerate")
    from transformers import TrainingArguments

    from headrace.trainer.integrations.huggingface_trainer import HeadraceTrainer

    job = sets.training(f"evaluated-huggingface-{len(names)}", *names)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=STEPS,
        gradient_accumulation_steps=MICROBATCHES,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    with trainer.connect(sets.endpoint, job=job, equal_microbatches=True) as loader:
        training = HeadraceTrainer(model=small_llama(loader), args=args, loader=loader)
        training.train()
        found = training.evaluate()
        assert training.evaluate("short")["eval_loss"] == pytest.approx(found.get("eval_loss", found.get("eval_short_loss")))
        with pytest.raises(UserError, match=r"no validation set 'shot': it has short"):
            training.evaluate("shot")
    key = "eval_loss" if len(names) == 1 else "eval_{}_loss"
    expected = {key.format(name): pytest.approx(sets.loss(training.model, name, job), rel=1e-4) for name in names}
    assert {name: value for name, value in found.items() if name.endswith("_loss")} == expected
    if len(names) == 2:
        assert found["eval_long_samples_per_second"] * found["eval_long_runtime"] == pytest.approx(SIZES["long"], rel=0.05)
    logged = [(entry["step"], entry[name]) for entry in training.state.log_history for name in expected if name in entry]
    assert sorted({step for step, _ in logged}) == [2, STEPS]
    assert logged[0][1] - logged[len(names)][1] > 0.01, "it has learnt meanwhile"
    assert sets.trains_as_without(job)


def test_a_loop_with_accelerate_evaluates_a_set_between_steps(sets: Sets) -> None:
    needs("accelerate")
    from accelerate import Accelerator

    from headrace.trainer.integrations import accelerate_loader as headrace
    from headrace.trainer.integrations.model_inputs import packed_inputs

    accelerator = Accelerator(cpu=True)
    job = sets.training("evaluated-accelerate", "long")
    with headrace.connect(accelerator, sets.endpoint, job=job) as loader:
        model = accelerator.prepare(small_llama(loader))
        expected = pytest.approx(sets.loss(model, "long", job), rel=1e-4)
        for step in loader:
            for _ in headrace.microbatches(accelerator, model, step):
                pass
            loader.commit(step)
            loss_sum = targets = 0.0
            for data in headrace.evaluate(accelerator, loader, "long"):
                with torch.no_grad():
                    loss_sum += float(model(**packed_inputs(data, loader.vocabulary), num_items_in_batch=1).loss)
                targets += data.target_weight
            assert loss_sum / targets == expected
    assert sets.trains_as_without(job)


@pytest.mark.filterwarnings("ignore")  # Lightning warns of what is not set
def test_the_trainer_of_lightning_validates_sets_within_an_epoch_and_alone(sets: Sets) -> None:
    needs("lightning")
    from lightning.pytorch import LightningModule, Trainer

    from headrace.errors import ConflictError
    from headrace.trainer.integrations.lightning_loader import HeadraceBatches

    class Llama(LightningModule):
        def __init__(self, loader: Any) -> None:
            super().__init__()
            self.model = small_llama(loader)
            self.validated: list[tuple[int, dict[str, float]]] = []

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            scale = batch.pop("loss_scale")
            return self.model(**batch, num_items_in_batch=1).loss * scale

        def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
            targets = batch.pop("target_weight")
            loss = self.model(**batch, num_items_in_batch=max(targets, 1.0)).loss
            self.log("loss", loss, batch_size=targets, sync_dist=True)

        def on_validation_end(self) -> None:
            losses = {name: float(loss) for name, loss in self.trainer.callback_metrics.items()}
            self.validated.append((self.trainer.global_step, losses))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def fit(loader: Any, every: int) -> tuple[Llama, Trainer, list[Any]]:
        batches = HeadraceBatches(loader)
        training = Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            max_epochs=1,
            accumulate_grad_batches=MICROBATCHES,
            val_check_interval=every,
            callbacks=[batches],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        model = Llama(loader)
        sets_of_job = [batches.validation(name) for name in SIZES]
        training.fit(model, train_dataloaders=batches, val_dataloaders=sets_of_job)
        return model, training, sets_of_job

    job = sets.training("evaluated-lightning", *SIZES)
    with trainer.connect(sets.endpoint, job=job, equal_microbatches=True) as loader:
        model, training, sets_of_job = fit(loader, every=2 * MICROBATCHES)
        [alone] = training.validate(model, sets_of_job[1], verbose=False)
    expected = {name: pytest.approx(sets.loss(model.model, name, job), rel=1e-4) for name in SIZES}
    steps, last = zip(*model.validated[1:-1], strict=True)  # without the check before the first step, and the one alone
    assert steps == (2, STEPS)
    assert last[-1] == {f"loss/dataloader_idx_{place}": expected[name] for place, name in enumerate(SIZES)}
    assert alone == {"loss": expected["long"]}
    assert sets.trains_as_without(job)
    job = sets.training("evaluated-within-a-step", *SIZES)
    with (
        trainer.connect(sets.endpoint, job=job, equal_microbatches=True) as loader,
        pytest.raises(ConflictError, match="step 0 is not committed, and an evaluation of 'short' was asked for"),
    ):
        fit(loader, every=1)
