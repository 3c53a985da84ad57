"""A Llama in a loop with Accelerate. It needs `pip install 'headrace[trainer,integrations]'`.

accelerate launch examples/integrations/accelerate_loop.py --endpoint 127.0.0.1:7070 --job texts --checkpoints /tmp/accelerate
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from settings import arguments
from small_llama import small_llama

from headrace.trainer.integrations import accelerate_loader as headrace
from headrace.trainer.integrations.model_inputs import packed_inputs


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    accelerator = Accelerator()
    loader = headrace.connect(accelerator, options.endpoint, job=options.job)
    model = small_llama(loader)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
    if (options.checkpoints / "model.safetensors").exists():
        accelerator.load_state(str(options.checkpoints))
    with loader:
        for step in loader:
            loss_sum = torch.zeros((), device=accelerator.device)
            for data in headrace.microbatches(accelerator, model, step):
                inputs = packed_inputs(data, loader.vocabulary)
                loss = model(**inputs, num_items_in_batch=1).loss  # the sum over targets
                accelerator.backward(loss * headrace.loss_scale(accelerator, step))
                loss_sum += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            loss_mean = accelerator.reduce(loss_sum, "sum").item() / max(1, step.num_targets)
            loader.commit(step, loss=loss_mean)
            accelerator.print(f"step {step.index} loss {loss_mean:.6f}", flush=True)
            if (step.index + 1) % options.every == 0:
                accelerator.save_state(str(options.checkpoints))
        model.eval()
        for name in loader.spec.validation:
            sums = torch.zeros(2, device=accelerator.device)
            with torch.no_grad():
                for data in headrace.evaluate(accelerator, loader, name):
                    loss = model(**packed_inputs(data, loader.vocabulary), num_items_in_batch=1).loss
                    sums += torch.stack([loss, loss.new_tensor(data.target_weight)])
            loss_sum, targets = accelerator.reduce(sums, "sum").tolist()
            accelerator.print(f"{name} loss {loss_sum / targets:.6f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
