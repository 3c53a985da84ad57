"""torchft: data parallel replicas of one process each, which go on without those that are lost; its lighthouse, and a replica.

    python -m benchmarks.peers.torchft_ddp lighthouse --heartbeat-timeout-ms 5000 --tick-ms 100
    python -m benchmarks.peers.torchft_ddp replica --lighthouse ADDRESS --name replica_0 --heartbeat-ms 100 --timeout-s 60

A replica prints the number of every step that it commits, with the time of the clock.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

WIDTH, NUM_LAYERS, BATCH = 512, 8, 512  # two million parameters
LEAST_REPLICAS = 2
JOIN_TIMEOUT_MS = 10_000  # as in its own example; less, and replicas that are a little late train apart from the others


def main() -> None:
    """Until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    roles = parser.add_subparsers(dest="role", required=True)
    lighthouse = roles.add_parser("lighthouse")
    lighthouse.add_argument("--heartbeat-timeout-ms", type=int, required=True)
    lighthouse.add_argument("--tick-ms", type=int, required=True)
    replica = roles.add_parser("replica")
    replica.add_argument("--lighthouse", required=True)
    replica.add_argument("--name", required=True)
    replica.add_argument("--heartbeat-ms", type=int, required=True)
    replica.add_argument("--timeout-s", type=float, required=True)
    options = parser.parse_args()
    if options.role == "lighthouse":
        _watch_over(options)
    else:
        _train(options)


def _watch_over(options: argparse.Namespace) -> None:
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=LEAST_REPLICAS,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=options.tick_ms,
        heartbeat_timeout_ms=options.heartbeat_timeout_ms,
    )
    print(server.address(), flush=True)
    while True:
        time.sleep(60)


def _train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=options.timeout_s)
    model = nn.Sequential(*(layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    adamw = torch.optim.AdamW(model.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["adamw"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adamw": adamw.state_dict()},
        min_replica_size=LEAST_REPLICAS,
        replica_id=options.name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=options.lighthouse,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=options.heartbeat_ms),
        timeout=timeout,
        init_sync=False,
    )
    optimizer = Optimizer(manager, adamw)
    batch = torch.randn(BATCH, WIDTH)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(flat).wait()  # not by its DDP, which 0.2.0 has ended with an AttributeError in here
        for gradient, summed in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        optimizer.step()
        if manager.current_step() > before:
            print(before, time.time(), manager.num_participants(), flush=True)


if __name__ == "__main__":
    main()
