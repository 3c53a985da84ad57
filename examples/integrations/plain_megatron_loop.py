"""The GPT of `megatron_loop.py` in a loop without Megatron's schedules and data: what its losses are compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_loop import small_gpt
from settings import arguments

from headrace import trainer


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    gpt = small_gpt()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, weight_decay=0.0)
    with trainer.connect(options.endpoint, job=options.job) as loader:
        for step in loader:
            loss_mean = 0.0
            for microbatch in step:
                rows = microbatch.data.padded()
                losses = gpt(rows.input_ids, rows.position_ids, None, labels=rows.labels.clamp(min=0))
                loss = losses[rows.labels != -100].sum() / step.num_targets
                loss.backward()
                loss_mean += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            loader.commit(step, loss=loss_mean)
            print(f"step {step.index} loss {loss_mean:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
