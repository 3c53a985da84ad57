"""`python -m benchmarks.loader.loops LIBRARY ...`: a training loop of another library, fed by its own loader or by ours.

The model is EMULATED: it reads a byte of every page of a batch and has one weight, so that the loop waits for data only. Its own
loader is a DataLoader with two workers, as the libraries' pages say, over webdataset; it decodes and collates in them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import webdataset  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.utils.data import DataLoader

import headrace.torchaudio_import  # noqa: F401  # before transformers, which fails where torchaudio's native part does
from benchmarks.preprocess.meter import Meter
from benchmarks.preprocess.workload import BATCH_SAMPLES, GLOBAL_BATCH, SampleDecoder, collate, touch
from headrace import trainer
from headrace.trainer import StepLoader
from headrace.trainer.loading.steps import Microbatch

MICROBATCHES = GLOBAL_BATCH // BATCH_SAMPLES
WORKERS, PREFETCHED = 2, 4
_NO_END = 1_000_000


class ReadingModel(nn.Module):
    """EMULATED: a loss of 0, behind a look at every page of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, patches: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": 0.0 * self.weight.sum() * touch(patches)}


def main() -> None:
    """Train until the time is over, print the reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LOOPS)
    parser.add_argument("--folder", type=Path, help="of shards, which its own loader reads")
    parser.add_argument("--endpoint", help="of the reorder service, in place of a folder")
    parser.add_argument("--job", default="")
    parser.add_argument("--skip", type=int, required=True, help="samples before the measurement")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--watch", type=int, action="append", default=[], metavar="PID")
    options = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter(skip_samples=options.skip, seconds=options.seconds, watched=options.watch)
    LOOPS[options.library](meter, options)
    meter.reading().print()


def inputs(microbatch: Microbatch) -> dict[str, Any]:
    """Return a microbatch of ours with the tensors that `collate` gives."""
    data = microbatch.data
    return {
        "input_ids": data.input_ids,
        "labels": data.labels,
        "lengths": data.cu_seqlens.diff(),
        "patches": data.patches,
        "grids": data.image_grids,
    }


def samples_of(folder: Path) -> Any:
    """Return the endless decoded samples of a folder of shards, which its workers share."""
    decode = SampleDecoder()
    shards = sorted(map(str, folder.glob("*.tar")))
    return (
        webdataset.WebDataset(shards, shardshuffle=False)
        .repeat()
        .map(lambda sample: decode(sample["jpg"], sample["txt"].decode()))
    )


def data_loader(folder: Path) -> DataLoader[Any]:
    """Return the library's own loader of a folder of shards."""
    return DataLoader(
        samples_of(folder), batch_size=BATCH_SAMPLES, collate_fn=collate, num_workers=WORKERS, prefetch_factor=PREFETCHED
    )


def connected(options: argparse.Namespace) -> StepLoader:
    """Return our loader of a job."""
    return trainer.connect(options.endpoint, job=options.job, equal_microbatches=True)


def huggingface(meter: Meter, options: argparse.Namespace) -> None:
    """The Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Metered(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            control.should_training_stop = not meter.add(GLOBAL_BATCH)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=_NO_END,
            per_device_train_batch_size=BATCH_SAMPLES,
            gradient_accumulation_steps=MICROBATCHES,
            dataloader_num_workers=WORKERS,
            dataloader_prefetch_factor=PREFETCHED,
            dataloader_pin_memory=False,
            accelerator_config={"dispatch_batches": False},
            remove_unused_columns=False,
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
            use_cpu=True,
        )
        if options.folder:
            Trainer(
                model=ReadingModel(),
                args=arguments,
                train_dataset=samples_of(options.folder),
                data_collator=collate,
                callbacks=[Metered()],
            ).train()
            return
        from headrace.trainer.integrations.huggingface_trainer import HeadraceTrainer

        with connected(options) as loader:
            HeadraceTrainer(model=ReadingModel(), args=arguments, loader=loader, inputs=inputs, callbacks=[Metered()]).train()


def accelerate(meter: Meter, options: argparse.Namespace) -> None:
    """A loop with Accelerate, as its pages have it."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=MICROBATCHES if options.folder else 1,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
    )
    module = ReadingModel()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    if options.folder:
        for batch in accelerator.prepare(data_loader(options.folder)):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if not meter.add(BATCH_SAMPLES):
                return
    from headrace.trainer.integrations import accelerate_loader

    with accelerate_loader.connect(accelerator, options.endpoint, job=options.job) as loader:
        for step in loader:
            for data in accelerate_loader.microbatches(accelerator, model, step):
                accelerator.backward(model(patches=data.patches)["loss"] * accelerate_loader.loss_scale(accelerator, step))
            optimizer.step()
            optimizer.zero_grad()
            loader.commit(step)
            if not meter.add(GLOBAL_BATCH):
                return


def lightning(meter: Meter, options: argparse.Namespace) -> None:
    """The Trainer of Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = ReadingModel()

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:  # noqa: ARG002
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if not meter.add(BATCH_SAMPLES):
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def fit(data: Any, *callbacks: Any) -> None:
        Trainer(
            accelerator="cpu",
            max_epochs=-1,
            accumulate_grad_batches=MICROBATCHES,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), train_dataloaders=data)

    if options.folder:
        fit(data_loader(options.folder))
        return
    from headrace.trainer.integrations.lightning_loader import HeadraceBatches

    with connected(options) as loader:
        batches = HeadraceBatches(loader, inputs=inputs)
        fit(batches, batches)


LOOPS: dict[str, Callable[[Meter, argparse.Namespace], None]] = {
    "huggingface": huggingface,
    "accelerate": accelerate,
    "lightning": lightning,
}

if __name__ == "__main__":
    main()
