"""A small Llama trained by torchtitan. It needs `pip install 'headrace[trainer]' 'torchtitan>=0.3' triton`.

torchrun --nproc-per-node 1 examples/integrations/torchtitan_loop.py --endpoint 127.0.0.1:7070 --job texts \
    --checkpoints /tmp/torchtitan
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from settings import parser
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer
from torchtitan_llama import MAX_NORM, SEED, SEQ_LEN, llama, lr_scheduler, optimizer

from headrace.trainer.integrations.torchtitan_loader import HeadraceDataLoader, HeadraceValidationLoader


def main() -> None:
    """Train until the job's last step is committed."""
    own = parser()
    own.add_argument("--validation", metavar="SET", default="", help="validation set of the job, for the steps of --every")
    own.add_argument("--weights", default="", help="checkpoint of a model to begin with (default: weights of torchtitan's)")
    options = own.parse_args()
    init_logger()
    padded = not torch.cuda.is_available()
    config = Trainer.Config(
        model_spec=llama(),
        hf_assets_path=str(Path(__file__).parents[2] / "preprocessor" / "headrace" / "preprocessor" / "text"),
        dump_folder=str(options.checkpoints),
        dataloader=HeadraceDataLoader.Config(endpoint=options.endpoint, job=options.job, padded=padded),
        validator=Validator.Config(
            enable=bool(options.validation),
            freq=options.every,
            dataloader=HeadraceValidationLoader.Config(job=options.job, dataset=options.validation),
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        training=TrainingConfig(
            steps=options.steps,
            local_batch_size=1,
            global_batch_size=options.microbatches * int(os.environ["WORLD_SIZE"]),
            seq_len=SEQ_LEN,
            max_norm=MAX_NORM,
            disable_cuda_graphs=True,
            mixed_precision_param="float32" if padded else "bfloat16",
        ),
        debug=DebugConfig(seed=SEED),
        loss=CrossEntropyLoss.Config(),
        optimizer=optimizer(),
        lr_scheduler=lr_scheduler(),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=options.every, last_save_model_only=False, initial_load_path=options.weights or None
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
    )
    training = config.build()
    training.train()
    training.dataloader.close()
    training.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
