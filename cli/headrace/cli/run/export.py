"""`headrace export`: a checkpoint of a pipeline or of nodes, for `transformers` or `torch.distributed.checkpoint`."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.former_names import also_called

_EPILOG = """\
examples:
  headrace export checkpoints/ exported/ --model /models/Qwen2.5-VL-3B-Instruct
  headrace export checkpoints/ exported/ --llm /models/Qwen2.5-0.5B --step 2000 --dtype bfloat16
  headrace export checkpoints/ exported/ --model /models/Qwen2.5-VL-3B-Instruct --as dcp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace export`."""
    parser.epilog = _EPILOG
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder of `headrace train --checkpoint`")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is empty or not there yet")
    what = parser.add_argument_group("what training started from, as `model:` in the file of --topology or --nodes")
    what.add_argument("--model", type=Path, metavar="DIR", help="the whole model")
    for unit in ("vision", "audio", "llm"):
        what.add_argument(f"--{unit}", type=Path, metavar="DIR", help=f"of {unit}; with several, OUT has a folder of each")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after so many steps (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: as training found them)",
    )
    parser.add_argument(
        "--as",
        dest="layout",
        choices=("safetensors", "dcp"),
        default="safetensors",
        help="safetensors: for from_pretrained of transformers. dcp: for torch.distributed.checkpoint, by the names of the "
        "model's state_dict (default: %(default)s)",
    )
    also_called(parser, "--as", "--format")


def run(args: argparse.Namespace) -> int:
    """Write the folder, and say where it is."""
    from headrace.errors import UserError
    from headrace.trainer.models.adapted_units import HuggingFaceUnits
    from headrace.trainer.models.whole_model import need_transformers
    from headrace.trainer.pipeline.checkpoint_files import Checkpoint, complete_steps

    if args.model is not None and (args.vision or args.audio or args.llm):
        raise UserError("--model is a whole model, and --vision, --audio and --llm are parts: name either")
    units = HuggingFaceUnits(whole=args.model, vision=args.vision, audio=args.audio, llm=args.llm)
    steps = complete_steps(args.checkpoint)
    if args.step is not None and args.step not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{args.checkpoint} has no complete checkpoint after {args.step} steps; there are {have}")
    checkpoint = Checkpoint.newest(args.checkpoint) if args.step is None else Checkpoint(args.checkpoint, args.step)
    need_transformers()
    from headrace.cli.progress_bar import working
    from headrace.trainer.pipeline.checkpoint_export import export_checkpoint

    with working(f"writing {args.out}"):
        folders = export_checkpoint(checkpoint, units, args.out, dtype=args.dtype, format=args.layout)
    for folder in folders:
        print(f"step {checkpoint.step} written to {folder}")
    return 0
