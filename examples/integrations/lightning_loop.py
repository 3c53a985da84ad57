"""A Llama trained by the Trainer of Lightning. It needs `pip install 'headrace[trainer,integrations]'`.

python examples/integrations/lightning_loop.py --endpoint 127.0.0.1:7070 --job texts --checkpoints /tmp/lightning
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from settings import arguments
from small_llama import small_llama

from headrace import trainer
from headrace.trainer.integrations.lightning_loader import HeadraceBatches


class Llama(LightningModule):
    """The small Llama, which returns the summed loss of a batch, scaled."""

    def __init__(self, loader: trainer.StepLoader) -> None:
        super().__init__()
        self.model = small_llama(loader)
        self.loss_mean = 0.0
        self.sets = list(loader.spec.validation)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """The loss of one microbatch."""
        scale = batch.pop("loss_scale")
        loss = self.model(**batch, num_items_in_batch=1).loss * scale
        self.loss_mean += loss.item() / self.trainer.accumulate_grad_batches
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the loss of a step, over all ranks, behind its last microbatch."""
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            loss = self.trainer.strategy.reduce(torch.tensor(self.loss_mean, device=self.device), reduce_op="mean")
            if self.trainer.is_global_zero:
                print(f"step {self.trainer.global_step - 1} loss {loss:.6f}", flush=True)
            self.loss_mean = 0.0

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the mean loss of one microbatch, which counts by its targets in that of its set."""
        targets = batch.pop("target_weight")
        loss = self.model(**batch, num_items_in_batch=max(targets, 1.0)).loss
        self.log(f"{self.sets[dataloader_idx]}_loss", loss, batch_size=targets, sync_dist=True, add_dataloader_idx=False)

    def on_validation_end(self) -> None:
        """Print the loss of each set, over all ranks."""
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            for name in self.sets:
                print(f"{name} loss {self.trainer.callback_metrics[f'{name}_loss']:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a constant rate."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    rank, num_ranks, devices = 0, 1, "auto"
    if TorchElasticEnvironment.detect():
        devices = os.environ["LOCAL_WORLD_SIZE"]  # without GPUs Lightning would take one
        rank, num_ranks = (environment := TorchElasticEnvironment()).global_rank(), environment.world_size()
    loader = trainer.connect(options.endpoint, job=options.job, rank=rank, num_ranks=num_ranks, equal_microbatches=True)
    with loader:
        batches = HeadraceBatches(loader)
        saved = ModelCheckpoint(options.checkpoints, every_n_train_steps=options.every, save_top_k=-1, save_last=True)
        training = Trainer(
            accelerator="auto",
            devices=devices,
            max_steps=options.steps,
            max_epochs=1,  # those of the job are all in it
            accumulate_grad_batches=options.microbatches,
            callbacks=[batches, saved],
            logger=False,
            enable_progress_bar=False,
        )
        last = options.checkpoints / "last.ckpt"
        sets = [batches.validation(name) for name in loader.spec.validation]
        training.fit(Llama(loader), batches, val_dataloaders=sets, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
