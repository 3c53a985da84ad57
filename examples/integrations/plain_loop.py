"""The Llama of this folder in a loop without any framework: what the losses of the others are compared with.

python examples/integrations/plain_loop.py --endpoint 127.0.0.1:7070 --job texts --checkpoints /tmp/unused
"""

from __future__ import annotations

import torch
from settings import arguments
from small_llama import small_llama
from transformers import LlamaForCausalLM

from headrace import trainer
from headrace.trainer.integrations.model_inputs import packed_inputs


def evaluate(model: LlamaForCausalLM, loader: trainer.StepLoader, name: str) -> float:
    """Return the mean loss over the targets of a validation set."""
    loss_sum = targets = 0.0
    with torch.no_grad():
        for step in loader.evaluate(name):
            for microbatch in step:
                inputs = packed_inputs(microbatch.data, loader.vocabulary)
                loss_sum += model(**inputs, num_items_in_batch=1).loss.item()
                targets += microbatch.data.target_weight
    return loss_sum / targets


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    with trainer.connect(options.endpoint, job=options.job) as loader:
        model = small_llama(loader)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        for step in loader:
            loss_mean = 0.0
            for microbatch in step:
                inputs = packed_inputs(microbatch.data, loader.vocabulary)
                loss = model(**inputs, num_items_in_batch=step.num_targets).loss
                loss.backward()
                loss_mean += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            loader.commit(step, loss=loss_mean)
            print(f"step {step.index} loss {loss_mean:.6f}", flush=True)
        for name in loader.spec.validation:
            print(f"{name} loss {evaluate(model, loader, name):.6f}", flush=True)


if __name__ == "__main__":
    main()
