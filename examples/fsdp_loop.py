"""The model of `plain_loop.py`, sharded over ranks by FSDP2. For the same job it prints the same losses.

torchrun --nproc-per-node 2 examples/fsdp_loop.py --endpoint 127.0.0.1:7070 --job demo
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from plain_loop import SmallModel, arguments
from torch.distributed.fsdp import fully_shard

from headrace import trainer


def in_lockstep(step: trainer.Step) -> Iterator[trainer.Microbatch | None]:
    """This rank's microbatches, then None for as long as another rank has one.

    Every forward and backward gathers and scatters over all ranks, so that all have to run as many. Ranks with more replicas
    than others have more microbatches.
    """
    microbatches = iter(step)
    while True:
        microbatch = next(microbatches, None)
        any_left = torch.tensor(microbatch is not None, dtype=torch.int32)
        dist.all_reduce(any_left, dist.ReduceOp.MAX)
        if not any_left:
            return
        yield microbatch


def main() -> None:
    """Train until the job's last step is committed."""
    args = arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with trainer.connect(args.endpoint, job=args.job, rank=rank, num_ranks=num_ranks) as loader:
        torch.manual_seed(loader.spec.seed)  # each rank keeps its shard of the same weights
        model = SmallModel(loader).to(device)
        fully_shard(model.block)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        no_tokens = torch.empty(0, dtype=torch.int64, device=device)
        for step in loader:
            loss_sum, num_targets = 0.0, 0
            for microbatch in in_lockstep(step):
                if microbatch is None:
                    model(no_tokens, no_tokens, no_tokens, no_tokens).backward()  # gradients of 0
                    continue
                data = microbatch.data.to(device)
                loss = model(data.input_ids, data.position_ids, data.labels, data.patches)
                loss.backward()
                loss_sum += loss.item()
                num_targets += data.num_targets
            totals = torch.tensor([loss_sum, num_targets], dtype=torch.float64)
            dist.all_reduce(totals)
            loss_sum, num_targets = totals[0].item(), max(1.0, totals[1].item())
            for parameter in model.parameters():
                parameter.grad *= num_ranks / num_targets  # FSDP has averaged over the ranks: their sum is wanted
            optimizer.step()
            optimizer.zero_grad()
            loader.commit(step, loss=loss_sum / num_targets)
            if rank == 0:
                print(f"step {step.index} loss {loss_sum / num_targets:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
