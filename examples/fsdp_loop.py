"""The model of `plain_loop.py`, sharded over ranks by FSDP2. For the same job it prints the same losses.

torchrun --nproc-per-node 2 examples/fsdp_loop.py --endpoint 127.0.0.1:7070 --job demo
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from plain_loop import SmallModel, arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headrace import trainer


def main() -> None:
    """Train until the job's last step is committed."""
    args = arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("dp",))
    with trainer.connect(args.endpoint, job=args.job, mesh=mesh, equal_microbatches=True) as loader:
        torch.manual_seed(loader.spec.seed)  # each rank keeps its shard of the same weights
        model = SmallModel(loader).to(device)
        fully_shard(model.block)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for step in loader:
            scale = num_ranks / max(1, step.num_targets)  # FSDP averages over the ranks: their sum is wanted
            loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
            for microbatch in step:  # as many on every rank, since every forward gathers over all: empty ones fill up
                data = microbatch.data.to(device)
                loss = model(data.input_ids, data.position_ids, data.labels, data.patches)
                (loss * scale).backward()
                loss_sum += loss.detach()
            dist.all_reduce(loss_sum)
            loss_mean = loss_sum.item() / max(1, step.num_targets)
            optimizer.step()
            optimizer.zero_grad()
            loader.commit(step, loss=loss_mean)
            if rank == 0:
                print(f"step {step.index} loss {loss_mean:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
