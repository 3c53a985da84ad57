"""The Llama of this folder in a loop without any framework: what the losses of the others are compared with.

python examples/integrations/plain_loop.py --endpoint 127.0.0.1:7070 --job demo --checkpoints /tmp/unused
"""

from __future__ import annotations

import torch
from settings import arguments, small_llama

from headrace import trainer
from headrace.trainer.integrations.model_inputs import packed_inputs


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


if __name__ == "__main__":
    main()
