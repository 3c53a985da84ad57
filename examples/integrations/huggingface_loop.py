"""A Llama trained by the Trainer of Hugging Face. It needs `pip install 'headrace[trainer,integrations]'`.

python examples/integrations/huggingface_loop.py --endpoint 127.0.0.1:7070 --job texts --checkpoints /tmp/huggingface
"""

from __future__ import annotations

import os

from settings import arguments
from small_llama import small_llama
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from headrace import trainer
from headrace.trainer.integrations.huggingface_trainer import HeadraceTrainer


class PrintedLosses(TrainerCallback):
    """Prints what the Trainer logs."""

    def on_log(self, args, state, control, logs, **_) -> None:
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step - 1} loss {logs['loss']:.6f}", flush=True)

    def on_evaluate(self, args, state, control, metrics, **_) -> None:
        if state.is_world_process_zero:
            print(*(f"{name} {value:.6f}" for name, value in metrics.items() if name.endswith("_loss")), flush=True)


def main() -> None:
    """Train until the job's last step is committed."""
    options = arguments()
    args = TrainingArguments(
        output_dir=str(options.checkpoints),
        max_steps=options.steps,
        gradient_accumulation_steps=options.microbatches,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_steps=options.every,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    loader = trainer.connect(
        options.endpoint, job=options.job, rank=args.process_index, num_ranks=args.world_size, equal_microbatches=True
    )
    with loader:
        training = HeadraceTrainer(model=small_llama(loader), args=args, loader=loader, callbacks=[PrintedLosses()])
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        training.train(resume_from_checkpoint=get_last_checkpoint(str(options.checkpoints)))
        if loader.spec.validation:
            training.evaluate()


if __name__ == "__main__":
    main()
