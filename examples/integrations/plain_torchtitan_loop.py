"""The Llama of `torchtitan_loop.py` in a loop without torchtitan's Trainer: what its losses are compared with.

The weights it begins with are left in the folder of checkpoints, for `torchtitan_loop.py --weights`.
"""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from settings import arguments
from torch.nn import functional
from torchtitan_llama import MAX_NORM, SEED, llama, lr_scheduler, optimizer

from headrace import trainer
from headrace.trainer.loading.collate import PackedMicrobatch


def initial_llama() -> torch.nn.Module:
    """Return it as torchtitan makes it in one process."""
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = llama().model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def evaluate(model: torch.nn.Module, loader: trainer.StepLoader, name: str) -> float:
    """Return the mean loss over the targets of a validation set."""
    loss_sum = targets = 0.0
    with torch.no_grad():
        for step in loader.evaluate(name):
            for microbatch in step:
                if microbatch.data.num_targets:
                    loss_sum += float(summed_loss(model, microbatch.data))
                    targets += microbatch.data.num_targets
    return loss_sum / targets


def summed_loss(model: torch.nn.Module, data: PackedMicrobatch) -> torch.Tensor:
    """Return the sum of the losses of a microbatch's targets."""
    rows = data.padded()
    logits = model(rows.input_ids, positions=rows.position_ids)
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows.labels.flatten(), reduction="sum")


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    model = initial_llama()
    dcp.save(model.state_dict(), checkpoint_id=options.checkpoints, no_dist=True)
    optimizers = optimizer().build(model_parts=[model])
    rates = lr_scheduler().build(optimizers=optimizers, training_steps=options.steps)
    with trainer.connect(options.endpoint, job=options.job) as loader:
        for step in loader:
            loss_mean = 0.0
            for microbatch in step:
                loss = summed_loss(model, microbatch.data) / step.num_targets
                loss.backward()
                loss_mean += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizers.step()
            rates.step()
            optimizers.zero_grad()
            loader.commit(step, loss=loss_mean)
            print(f"step: {step.index + 1} loss: {loss_mean:.6f}", flush=True)
        for name in loader.spec.validation:
            print(f"{name} loss {evaluate(model, loader, name):.6f}", flush=True)


if __name__ == "__main__":
    main()
