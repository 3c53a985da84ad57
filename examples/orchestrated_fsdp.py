"""Encoders and an LLM of one's own, sharded by FSDP2 on the same ranks; each is given equal work, wherever its samples are.

torchrun --nproc-per-node 2 examples/orchestrated_fsdp.py --endpoint 127.0.0.1:7070 --job fsdp

The job (examples/fsdp-job.yaml) says `trainer: fsdp`, and two replicas for two ranks. docs/fsdp.md has more.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from headrace.trainer.orchestrated import OrchestratedModel, connect


class Vision(nn.Module):
    """Makes a row of each token of all images."""

    def __init__(self, spec, width: int) -> None:
        super().__init__()
        values = spec.image.merge**2 * 3 * spec.image.patch**2
        self.layers = nn.Sequential(nn.Linear(values, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, data) -> Tensor:
        return self.layers(data.patches.view(-1, self.layers[0].in_features) / 255)


class Audio(nn.Module):
    """Makes a row of each token of all recordings: so many mel frames, the last ones of a recording with silence behind."""

    def __init__(self, spec, width: int) -> None:
        super().__init__()
        self.frames = spec.audio.frames_per_token
        self.layer = nn.Linear(self.frames * spec.audio.mel_bins, width)

    def forward(self, data) -> Tensor:
        recordings = data.mel.float().split(data.mel_frames.tolist())
        whole = [functional.pad(mel, (0, 0, 0, -len(mel) % self.frames)) for mel in recordings]
        return self.layer(torch.cat(whole).view(-1, self.layer.in_features))


class Llm(nn.Module):
    """One decoder block; what encoders make of images and recordings is where their placeholders are."""

    def __init__(self, vocabulary, width: int) -> None:
        super().__init__()
        self.placeholders = {"vision": vocabulary.image_token, "audio": vocabulary.audio_token}
        self.embedding = nn.Embedding(vocabulary.size, width)
        self.block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, norm_first=True)
        self.head = nn.Linear(width, vocabulary.size)

    def forward(self, data, tokens: dict[str, Tensor]) -> Tensor:
        """The summed loss of the targets: `labels` are shifted already, -100 is none."""
        x = self.embedding(data.input_ids)
        for encoder, rows in tokens.items():
            x = x.index_copy(0, (data.input_ids == self.placeholders[encoder]).nonzero().squeeze(1), rows)
        sample = (data.position_ids == 0).cumsum(0)
        x = self.block(x, src_mask=~(sample[:, None] == sample).tril())
        return functional.cross_entropy(self.head(x), data.labels, reduction="sum")


def main() -> None:
    """Train until the job's last step is committed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="of the reorder service")
    parser.add_argument("--job", required=True, help="name of a job that was submitted")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    with connect(args.endpoint, job=args.job) as loader:
        torch.manual_seed(loader.spec.seed)  # each rank keeps its shard of the same weights
        encoders = {"vision": Vision(loader.spec, 128), "audio": Audio(loader.spec, 128)}
        llm = Llm(loader.vocabulary, 128)
        fully_shard(llm.block, mesh=mesh)  # gathered by itself; the rest of a module as a whole
        model = OrchestratedModel(encoders, llm, mesh=mesh, spec=loader.spec, vocabulary=loader.vocabulary)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for step in loader.steps(model):
            for microbatch in step:  # as many on every rank
                model.accumulate(microbatch)
            result = model.average()
            optimizer.step()
            optimizer.zero_grad()
            loader.commit(step, loss=result.loss)
            if dist.get_rank() == 0:
                print(f"step {step.index} loss {result.loss:.6f}", flush=True)
        loader.settle()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
