"""`headrace profile`: measures the layers of a model on this machine, and writes the cost coefficients that planning reads."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.costs.profile_measuring import Measuring, Patience, progress_of_shares
from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES

if TYPE_CHECKING:
    from headrace.cli.costs.profile_report import Profile
    from headrace.spec import JobSpec
    from headrace.trainer.profiling.layer_times import LayerTimer
    from headrace.trainer.profiling.profiled_model import ProfiledModel

DEFAULT_TOKENS = "64,128,256,512,1024,2048,4096"
_FEWEST_COUNTS = 3
_MOST_BESIDE = 64
_EPILOG = """\
Every kind of layer is timed on packed samples of each of the numbers of positions (--tokens): patches of an image for the vision
encoder, frames (two mel frames) of a recording for the audio encoder, text tokens for the LLM, image tokens for the generator.
One layer stands for all that are alike; embedding, projectors and output layers are kinds of their own. The times of a unit are
the sums. With --tp, layers are cut as tensor parallelism cuts them, and one slice is timed, without its communication. Then the
unit is timed as one stage of a pipeline, of at most 8 layers, on microbatches of one to eight samples, in whose texts one token
of eight carries loss. This says what layers take in a stage, what every microbatch takes besides (calls of kernels, the gradient
of an embedding, sums of gradients), and what follows once a step: gradients are collected and clipped, weights updated.

All kinds and lengths are timed in turn, round after round, until their medians are known to --within a share. The conditions are
to be those of training: as many --threads as a rank has, and --beside as many others as share the cores.

The file has a polynomial a x^2 + b x + c for the forward of each layer, that of the LLM's head by tokens that carry loss, and for
each unit the times of its backward (gradients of inputs and of weights, and the re-run of checkpointing) over those of the
forward, and the seconds of a microbatch and of a step besides. It is what --coefficients reads: all of it in `headrace
orchestrate`; all but the step's in `compare`, `job submit` and `train --submit`; the samples' costs in `inspect --costs`; the
backward in `plan`, `simulate` (with the microbatch's where costs are in seconds) and `train --emulate`.

examples:
  headrace profile small --out small.json
  headrace profile 7b --precision bf16 --device cuda --tp 1,2,4 --spec job.yaml --out 7b.json
  headrace profile tiny --llm /models/Qwen2.5-0.5B --units llm --out qwen.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace profile` to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help=f"its size: {', '.join(MODEL_SHAPES)}")
    whose = parser.add_argument_group("model")
    for unit, part in (("vision", "vision encoder"), ("audio", "audio encoder"), ("llm", "LLM")):
        whose.add_argument(
            f"--{unit}", type=Path, metavar="DIR", help=f"take the {part} of a Hugging Face model, a folder with a config.json"
        )
    whose.add_argument("--units", metavar="UNIT,...", help="measure these only, of vision,audio,llm,generator (default: all)")
    whose.add_argument("--tp", default="1", metavar="N,...", help="tensor-parallel widths (default: %(default)s)")
    whose.add_argument("--spec", type=Path, metavar="JOB.yaml", help="the job whose image and audio settings the model has")
    whose.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary (default: the model's, or 32000)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--tokens", default=DEFAULT_TOKENS, metavar="N,...", help="positions of a sample (default: %(default)s)"
    )
    measuring.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="rounds at least, of which medians count (default: %(default)s)"
    )
    measuring.add_argument(
        "--within",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="go on until the 95 %% confidence intervals of a unit's times are no more than this to either side (default: 0.02)",
    )
    measuring.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="but once there are --repeats rounds not for longer, for the layers of a unit and for its stage (default: 30)",
    )
    measuring.add_argument(
        "--beside",
        type=int,
        default=0,
        metavar="N",
        help="have so many other processes measure the same meanwhile, as ranks that share processor cores will (default: 0)",
    )
    measuring.add_argument("--as-companion", action="store_true", help=argparse.SUPPRESS)
    measuring.add_argument(
        "--check", action="store_true", help="train the whole model on one mixed microbatch too, and compare it with the forecast"
    )
    device = parser.add_argument_group("device")
    device.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    device.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products, as in train (default: %(default)s)"
    )
    device.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model (default: as in train)")
    parser.add_argument(
        "--out", type=Path, default=Path("coefficients.json"), metavar="FILE", help="of coefficients (default: %(default)s)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run `headrace profile`: measure, fit, write the file and report the errors of the fit. Raises UserError."""
    counts, widths = _numbers("--tokens", args.tokens), _numbers("--tp", args.tp)
    for flag, number in (("--repeats", args.repeats), ("--threads", args.threads), ("--vocab", args.vocab)):
        if number is not None and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    if not (0 < args.within < math.inf and 0 <= args.seconds < math.inf and 0 <= args.beside <= _MOST_BESIDE):
        raise UserError(
            f"--within must be a share above 0, --seconds at least 0 and --beside from 0 to {_MOST_BESIDE}, got {args.within}, "
            f"{args.seconds} and {args.beside}"
        )
    if len(counts) < _FEWEST_COUNTS:
        raise UserError(f"--tokens needs at least {_FEWEST_COUNTS} different numbers for a curve, got {args.tokens}")
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder: name a file in it")
    part_file = args.out.with_name(args.out.name + ".part")
    try:
        part_file.touch()
    except OSError as err:
        raise UserError(f"cannot write to {args.out}: {err.strerror}; name another file with --out") from err
    try:
        document, profile = _profile(args, counts, widths)
        part_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part_file.replace(args.out)
    finally:
        part_file.unlink(missing_ok=True)
    if args.format == "json":
        print(json.dumps(profile.to_json() | {"file": str(args.out)}))
    else:
        profile.show(args.model)
        print(f"coefficients: {args.out}", file=sys.stderr)
    for warning in profile.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _numbers(flag: str, text: str) -> list[int]:
    numbers = [item.strip() for item in text.split(",")]
    for number in numbers:
        if not number.isdecimal() or not 1 <= int(number) <= 1 << 20:
            raise UserError(f"{flag} must be numbers from 1 to {1 << 20:,} like 64,256,1024, got {number!r}")
    return sorted(set(map(int, numbers)))


def _profile(args: argparse.Namespace, counts: Sequence[int], widths: Sequence[int]) -> tuple[dict[str, Any], Profile]:
    """Return the content of the file, and what was measured."""
    import torch

    from headrace.cli.costs.profile_companions import companions
    from headrace.cli.costs.profile_fit import FittedKind, part_costs, profile_document
    from headrace.cli.costs.profile_report import Profile
    from headrace.cli.costs.stage_fit import FittedStage
    from headrace.trainer.devices import local_device
    from headrace.trainer.models.adapted_units import HuggingFaceUnits
    from headrace.trainer.profiling.layer_times import LayerTimer
    from headrace.trainer.profiling.profiled_model import profiled_model
    from headrace.trainer.train_step import PRECISIONS

    device, dtype = local_device(args.device), PRECISIONS[args.precision]
    if args.beside and device.type != "cpu":
        raise UserError("--beside is for ranks that share processor cores: take it away, or add --device cpu")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    spec = _spec(args.spec)
    units = HuggingFaceUnits(vision=args.vision, audio=args.audio, llm=args.llm)
    profiled = profiled_model(args.model, units, image=spec.image, audio=spec.audio, vocab_size=args.vocab)
    parts = _parts(args, profiled)
    positions = {part: _within(part, counts, profiled) for part in parts}
    profiled.check_widths(parts, widths)
    measuring = Measuring(LayerTimer(profiled, device=device, dtype=dtype), profiled, positions, widths, device, dtype)
    patience = Patience(repeats=args.repeats, within=args.within, seconds=args.seconds)
    if args.as_companion:
        measuring.go_on_for_ever()
    profile = Profile(patience=patience)
    with companions(args, args.beside), progress_of_shares() as bar:
        for part in parts:
            times, share = measuring.layers(part, patience, bar)
            kinds = [FittedKind.of(of_kind) for of_kind in times]
            profile.kinds += kinds
            profile.uncertainty[part] = share
            if 1 not in widths:
                continue  # a stage is whole, and so are its layers
            stage, needed_bytes = measuring.stage(part, patience, bar)
            if stage is None:
                profile.too_large[part] = needed_bytes
            else:
                profile.stages[part] = FittedStage.of(stage, part_costs(kinds))
    head: dict[str, Any] = {"model": args.model}
    if adapted := {unit: path.name for unit in ("vision", "audio", "llm") if (path := getattr(args, unit)) is not None}:
        head["huggingface"] = adapted
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    head["measured_on"] = {"device": name, "dtype": args.precision, "torch": str(torch.__version__)}
    if args.beside:
        head["measured_on"]["beside"] = f"{args.beside} processes that did the same"
    head["measured_on"]["uncertainty"] = ", ".join(f"{part} {share:.1%}" for part, share in profile.uncertainty.items())
    document = profile_document(head, profile.kinds, widths, profile.stages)
    if args.check:
        profile.checked = _checked(document, profiled, measuring.timer, args.repeats)
    return document, profile


def _spec(path: Path | None) -> JobSpec:
    from headrace.spec import load_spec_yaml, parse_spec

    return parse_spec({"name": "profile", "sources": [{"path": "."}]}) if path is None else load_spec_yaml(path)


def _parts(args: argparse.Namespace, profiled: ProfiledModel) -> list[str]:
    """Return the parts to measure, in the order of the model. Raises UserError for one that the model lacks."""
    asked = profiled.parts if args.units is None else [unit.strip() for unit in args.units.split(",")]
    for part in asked:
        if part not in profiled.parts:
            raise UserError(f"--units names {part!r}, but model {args.model!r} has {', '.join(profiled.parts)}")
    if args.check and set(asked) != set(profiled.parts):
        raise UserError("--check compares the whole model: measure all of its units, without --units")
    return [part for part in profiled.parts if part in asked]


def _within(part: str, counts: Sequence[int], profiled: ProfiledModel) -> list[int]:
    """Return those numbers of positions that samples of the job can have. Raises UserError if they are too few for a curve."""
    most = profiled.most_positions(part)
    within = [count for count in counts if count <= most]
    if len(within) < _FEWEST_COUNTS:
        raise UserError(
            f"--tokens has only {within} up to the {most} positions that {part} has at most in the job's settings, and a curve "
            f"needs {_FEWEST_COUNTS}: give smaller numbers"
        )
    return within


def _checked(document: dict[str, Any], profiled: ProfiledModel, timer: LayerTimer, repeats: int) -> tuple[float, float]:
    """Return the forecast and the measured seconds of forward and backward of the whole model on a mixed microbatch."""
    from headrace.backward_factors import backward_factors
    from headrace.reorder_service.planning.cost_model.coefficients_document import parse_coefficients
    from headrace.reorder_service.planning.cost_model.cost import estimate
    from headrace.trainer.profiling.profiled_batch import mixed_probes

    costs = parse_coefficients(document)
    probes = mixed_probes(profiled.image, profiled.audio)
    estimated = estimate(
        probes, profiled.shape, image=profiled.image, audio=profiled.audio, units=profiled.parts, measured=costs.coefficients
    )
    factors = backward_factors(profiled.parts, measured=costs.backward_times(profiled.parts))
    forecast = sum(float(estimated.seconds[unit].sum()) * (1 + factors[unit]) for unit in profiled.parts)
    forecast += sum(map(sum, costs.microbatch_s(profiled.parts, factors).values()))
    return forecast, timer.whole(probes, repeats)
