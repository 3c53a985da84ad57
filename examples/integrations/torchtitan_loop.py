"""A small Llama trained by torchtitan. It needs `pip install 'headrace[trainer,integrations]'`.

torchrun --nproc-per-node 1 examples/integrations/torchtitan_loop.py --endpoint 127.0.0.1:7070 --job demo \
    --checkpoints /tmp/torchtitan
"""

from __future__ import annotations

from pathlib import Path

import torch
from settings import arguments
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from headrace.trainer.integrations.torchtitan_loader import HeadraceDataLoader


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    init_logger()
    vocab_size, seq_len = 4096, 512  # those of the job: its tokenizer, and its text.max_tokens
    llama = model_registry("debugmodel")
    llama.model.layers = llama.model.layers[:2]
    llama.model.vocab_size = vocab_size
    llama.model.tok_embeddings.num_embeddings = llama.model.lm_head.out_features = vocab_size
    if not torch.cuda.is_available():  # torchtitan's other attention has no backward on a processor
        for layer in llama.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=llama,
        hf_assets_path=str(Path(__file__).parents[2] / "preprocessor" / "headrace" / "preprocessor" / "text"),
        dump_folder=str(options.checkpoints),
        dataloader=HeadraceDataLoader.Config(endpoint=options.endpoint, job=options.job, padded=not torch.cuda.is_available()),
        training=TrainingConfig(
            steps=options.steps,
            local_batch_size=1,
            global_batch_size=options.microbatches,  # times the number of data-parallel ranks
            seq_len=seq_len,
            disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if torch.cuda.is_available() else "float32",
        ),
        debug=DebugConfig(seed=0),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        checkpoint=CheckpointManager.Config(enable=True, interval=options.every, last_save_model_only=False),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
    )
    training = config.build()
    training.train()
    training.dataloader.close()
    training.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
