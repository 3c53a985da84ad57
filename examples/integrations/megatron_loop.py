"""A small GPT trained by the schedules of Megatron-Core. It needs `pip install 'headrace[trainer,integrations]'`.

torchrun --nproc-per-node 1 examples/integrations/megatron_loop.py --endpoint 127.0.0.1:7070 --job texts \
    --checkpoints /tmp/megatron

With Megatron-LM or Megatron-Bridge, `forward_step` and the loop are theirs: the page says what is left.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from settings import arguments

from headrace.trainer.integrations.megatron_batches import MegatronBatches, get_batch, masked_loss

VOCAB_SIZE, SEQ_LENGTH = 4096, 512  # of the job: its tokenizer, and its text.max_tokens


def small_gpt() -> GPTModel:
    """Return it with fresh weights."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,  # gradients are divided by the targets of all microbatches and ranks
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(0)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    layers = get_gpt_layer_local_spec(normalization="LayerNorm")
    return GPTModel(config, layers, VOCAB_SIZE, SEQ_LENGTH, share_embeddings_and_output_weights=True)


def forward_step(batches: MegatronBatches, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Return a microbatch's losses, and the function that sums them."""
    batch = get_batch(batches, next(model.parameters()).device)
    keys = ("attention_mask", "labels", "packed_seq_params")
    losses = model(batch["tokens"], batch["position_ids"], **{key: batch[key] for key in keys})
    return losses, partial(masked_loss, batch["loss_mask"])


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    gpt = small_gpt()
    gpt = gpt.cuda() if torch.cuda.is_available() else gpt
    model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    gpt.config.finalize_model_grads_func = finalize_model_grads
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, weight_decay=0.0)
    batches = MegatronBatches(options.endpoint, job=options.job, padded=True)
    first = 0
    if saved := sorted(options.checkpoints.glob("iter_*/metadata.json")):
        state = dist_checkpointing.load({"model": gpt.sharded_state_dict()}, str(saved[-1].parent))
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.restore_state(state["dataloader_state_dict"])
        first = state["iteration"]
    for iteration in range(first, options.steps):
        model.zero_grad_buffer()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=options.microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        for parameter in gpt.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()  # else the next backward would add to `main_grad` under both its names
        loss_sum, num_targets = torch.stack([report["lm loss"] for report in reports]).sum(0).tolist()
        print(f"step {iteration} loss {loss_sum / num_targets:.6f}", flush=True)
        if (iteration + 1) % options.every == 0:
            state = {
                "optimizer": optimizer.state_dict(),
                "iteration": iteration + 1,
                "dataloader_state_dict": batches.save_state(),
            }
            folder = options.checkpoints / f"iter_{iteration + 1:07d}"
            folder.mkdir(parents=True)
            dist_checkpointing.save({"model": gpt.sharded_state_dict(), **state}, str(folder))
    batches.commit()
    batches.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
