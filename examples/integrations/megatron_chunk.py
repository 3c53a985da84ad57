"""Layers of Megatron-Core in Headrace's pipeline: a chunk of one's own takes the place of a stage of Headrace's model.

It needs `pip install 'headrace[trainer,integrations]'`, and a job of texts with `topology: {stages: {llm: 2}}`.

torchrun --nproc-per-node 2 examples/integrations/megatron_chunk.py --endpoint 127.0.0.1:7070 --job demo

Schedule, plans, messages, and sums of gradients are Headrace's; a layer, which is Megatron's, sees hidden states (T, 1, width) of
packed samples. Other blocks fit in the same way, whatever they are called with: `prepare` makes it, on the host.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from headrace.spec import parse
from headrace.trainer.devices import local_device
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.attention import Segments, packed_attention
from headrace.trainer.models.loss import StepLoss, Targets, token_loss
from headrace.trainer.pipeline.cargo import Feed
from headrace.trainer.pipeline.chunk import Inputs, Output
from headrace.trainer.pipeline.executor import Executor, run_step
from headrace.trainer.pipeline.feed import PipelineLoader
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from headrace.trainer.starting import num_ranks, process_group, rank, watched

THETA = 10_000.0


class PackedCore(nn.Module):
    """What layers of Megatron call between their products: attention inside each sample, (T, 1, H, D) -> (T, 1, H * D)."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Segments, **_: Any) -> Tensor:
        """Attend, with the samples' boundaries as the mask."""
        mixed = packed_attention(q[:, 0], k[:, 0], v[:, 0], attention_mask, causal=True)
        return mixed.flatten(1)[:, None]


class MegatronChunk(nn.Module):
    """Layers `first` up to, but not including, `last` of an LLM, as `headrace.trainer.pipeline.chunk.Chunk` asks for them.

    With the first layer comes the embedding, with the last one norm and head. Weights follow from their names, so that they are
    the same however the layers are cut.
    """

    token_width = 0
    """Nothing is behind the LLM."""

    def __init__(self, config: TransformerConfig, vocab_size: int, first: int, last: int, device: torch.device) -> None:
        """torch.distributed must be initialised, as Megatron asks for groups: here of this process alone."""
        super().__init__()
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        groups = ProcessGroupCollection(tp=alone, cp=alone, pp=alone)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = PackedCore
        self.device, self.width = device, config.hidden_size
        self._head_dim = config.kv_channels
        self.embed = nn.Embedding(vocab_size, self.width) if first == 0 else None
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerLayer(config, spec.submodules, layer_number=number + 1, pg_collection=groups)
                for number in range(first, last)
            }
        )
        is_last = last == config.num_layers
        self.norm = nn.RMSNorm(self.width) if is_last else None
        self.head = nn.Linear(self.width, vocab_size, bias=False) if is_last else None
        self.to(device)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values = torch.empty(parameter.shape).normal_(std=0.1, generator=generator)
                parameter.data.copy_(values)

    def prepare(self, data: PackedMicrobatch) -> Inputs:
        """Return the chunk's inputs of packed samples, on the host."""
        exponents = torch.arange(0, self._head_dim, 2) / self._head_dim
        angles = data.position_ids[:, None].float() * THETA**-exponents
        return Inputs(
            num_rows=len(data.input_ids),
            entry=None if self.embed is None else data.input_ids,
            layers=(torch.cat((angles, angles), dim=1)[:, None, None], Segments.of(data.cu_seqlens)),
            end=None if self.head is None else (Targets.of(data.labels, data.target_weights), data.target_weight),
        )

    def forward(self, inputs: Inputs, hidden: Tensor | None, _: Mapping[str, Tensor]) -> Output:
        """Run the layers of a portion. hidden: (T, width) from the chunk before, None in the first one."""
        x = self.embed(inputs.entry) if self.embed is not None else hidden
        x = x[:, None]
        angles, segments = inputs.layers
        for layer in self.layers.values():
            x, _ = layer(x, attention_mask=segments, rotary_pos_emb=angles)
        x = x[:, 0]
        if self.head is None or self.norm is None:
            return Output(rows=x)
        targets, target_weight = inputs.end
        loss_sum = token_loss(self.norm(x), targets, self.head.weight)
        return Output(loss=StepLoss(loss_sum=loss_sum, target_weight=target_weight))

    def rows_between_stages(self, num_rows: int) -> int:
        """Return the number of rows that pass between stages: all of them."""
        return num_rows

    def gather_slices(self, share: Tensor) -> Tensor:
        """Return the rows of all slices of the stage: it is the only one."""
        return share

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        """Raise an error: no unit is behind this one."""
        raise NotImplementedError("a pipeline of the LLM alone sends tokens to no unit")

    def input_token_counts(self, unit: str, data: PackedMicrobatch) -> Tensor:
        """Raise an error: no unit is in front of this one."""
        raise NotImplementedError("a pipeline of the LLM alone gets tokens of no unit")

    def take_weight_gradients(self) -> Callable[[], None]:
        """Raise an error: these layers put no weight gradients off."""
        raise NotImplementedError("schedule zero-bubble is not for layers of Megatron: take another one")


def small_config() -> TransformerConfig:
    """Return that of a model which is small enough for a processor."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def chunk_at(place: Place, topology: PipelineTopology, vocab_size: int, device: torch.device) -> MegatronChunk:
    """Return the chunk of a process, with as many layers as those of the others."""
    config = small_config()
    stages = topology.units["llm"].pp
    first, last = (config.num_layers * number // stages for number in (place.stage, place.stage + 1))
    return MegatronChunk(config, vocab_size, first, last, device)


def mean_gradients(
    executor: Executor, optimizer: ShardedAdamW, groups: ProcessGroups, routes: Routes, feed: Feed
) -> tuple[float, float]:
    """Run all microbatches of a step. Return its mean loss and the weight of its targets, which is their number unless the job
    has weights; each replica has its share of the gradients of that mean."""
    [totals] = run_step([executor], routes, [feed])
    executor.wire.flush()
    sums = torch.stack((totals.loss_sum, totals.loss_sum.new_tensor(totals.target_weight)))
    dist.all_reduce(sums, group=groups.everybody)
    loss_sum, target_weight = sums.tolist()
    optimizer.reduce()
    for piece in optimizer.pieces:
        if piece.weight.grad is not None:
            piece.weight.grad.div_(target_weight)
    return loss_sum / target_weight, target_weight


def main() -> None:
    """Train until the job's last step is committed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="of the reorder service")
    parser.add_argument("--job", required=True, help="name of a job that was submitted, of texts, with as many stages")
    options = parser.parse_args()
    topology = parse(PipelineTopology, {"units": {"llm": {"pp": num_ranks()}}}, "topology")
    device, place = local_device(), topology.place(rank())
    with (
        watched() as watch,
        process_group(device, watch, alone=True),
        PipelineLoader(options.endpoint, job=options.job, topology=topology, place=place, device=device) as loader,
    ):
        groups = ProcessGroups.make(topology, device, tied=False)
        chunk = chunk_at(place, topology, loader.vocabulary.size, device)
        optimizer = ShardedAdamW([[*chunk.parameters()]], groups.of_place[place].replicas)
        executor = Executor(topology, place, [chunk], Wire(groups.channels, device, torch.float32), backwards=optimizer)
        for step, feed in loader.steps(executor.prepare):
            loss, target_weight = mean_gradients(executor, optimizer, groups, feed.routes, feed)
            optimizer.step(1e-3)
            optimizer.discard()
            loader.commit_fed(step, feed, loss=loss, measured=())
            if rank() == 0:
                print(f"step {step.index} loss {loss:.6f} of {target_weight:g} targets", flush=True)
        loader.settle()


if __name__ == "__main__":
    main()
