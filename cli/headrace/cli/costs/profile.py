"""`headrace profile`: measures the layers of a model on this machine, and writes the cost coefficients that planning reads."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES

if TYPE_CHECKING:
    from headrace.cli.costs.profile_fit import FittedKind
    from headrace.spec import JobSpec
    from headrace.trainer.profiling.layer_times import KindTimes, LayerTimer
    from headrace.trainer.profiling.profiled_model import ProfiledModel

DEFAULT_TOKENS = "64,128,256,512,1024,2048,4096"
_FEWEST_COUNTS = 3
_EPILOG = """\
Every kind of layer is timed on packed samples of each of the numbers of positions (--tokens): patches of an image for the vision
encoder, frames (two mel frames) of a recording for the audio encoder, text tokens for the LLM, image tokens for the generator.
One layer stands for all that are alike; embedding, projectors and output layers are kinds of their own. The times of a unit are
the sums. With --tp, layers are cut as tensor parallelism cuts them, and one slice is timed, without its communication.

The file has a polynomial a x^2 + b x + c for the forward of each layer, and for each unit the times of its backward (gradients of
inputs and of weights, and the re-run of checkpointing) over those of the forward. It is what --coefficients reads: all of it in
`headrace compare`, `inspect --costs`, `job submit` and `train --submit`, the backward in `plan`, `simulate`, `train --emulate`.

examples:
  headrace profile small --out small.json
  headrace profile 7b --precision bf16 --device cuda --tp 1,2,4 --spec job.yaml --out 7b.json
  headrace profile tiny --llm /models/Qwen2.5-0.5B --units llm --out qwen.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace profile` to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help=f"its size: {', '.join(MODEL_SHAPES)}")
    for unit, part in (("vision", "vision encoder"), ("audio", "audio encoder"), ("llm", "LLM")):
        parser.add_argument(
            f"--{unit}", type=Path, metavar="PATH", help=f"take the {part} of a Hugging Face model, a folder with a config.json"
        )
    parser.add_argument("--units", metavar="UNIT,...", help="measure these only, of vision,audio,llm,generator (default: all)")
    parser.add_argument("--tokens", default=DEFAULT_TOKENS, metavar="N,...", help="positions of a sample (default: %(default)s)")
    parser.add_argument("--tp", default="1", metavar="N,...", help="tensor-parallel widths (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="times of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--spec", type=Path, metavar="SPEC.yaml", help="the job whose image and audio settings the model has")
    parser.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary (default: the model's, or 32000)")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products, as in train (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model (default: as in train)")
    parser.add_argument(
        "--check", action="store_true", help="train the whole model on one mixed microbatch too, and compare it with the forecast"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("coefficients.json"), metavar="FILE", help="of coefficients (default: %(default)s)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run `headrace profile`: measure, fit, write the file and report the errors of the fit. Raises UserError."""
    counts, widths = _numbers("--tokens", args.tokens), _numbers("--tp", args.tp)
    for flag, number in (("--repeats", args.repeats), ("--threads", args.threads), ("--vocab", args.vocab)):
        if number is not None and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
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
        document, kinds, checked = _profile(args, counts, widths)
        part_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part_file.replace(args.out)
    finally:
        part_file.unlink(missing_ok=True)
    if args.format == "json":
        print(json.dumps(_report(kinds, checked) | {"file": str(args.out)}))
    else:
        _print(args, kinds, checked)
    return 0


def _numbers(flag: str, text: str) -> list[int]:
    numbers = [item.strip() for item in text.split(",")]
    for number in numbers:
        if not number.isdecimal() or not 1 <= int(number) <= 1 << 20:
            raise UserError(f"{flag} must be numbers from 1 to {1 << 20:,} like 64,256,1024, got {number!r}")
    return sorted(set(map(int, numbers)))


def _profile(
    args: argparse.Namespace, counts: Sequence[int], widths: Sequence[int]
) -> tuple[dict[str, Any], list[FittedKind], tuple[float, float] | None]:
    """Return the content of the file, the fitted kinds and, with --check, forecast and measured seconds of the whole model."""
    import torch

    from headrace.cli.costs.profile_fit import FittedKind, profile_document
    from headrace.trainer.devices import local_device
    from headrace.trainer.models.adapted_units import HuggingFaceUnits
    from headrace.trainer.profiling.layer_times import LayerTimer
    from headrace.trainer.profiling.profiled_model import profiled_model
    from headrace.trainer.train_step import PRECISIONS

    device = local_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    spec = _spec(args.spec)
    units = HuggingFaceUnits(vision=args.vision, audio=args.audio, llm=args.llm)
    profiled = profiled_model(args.model, units, image=spec.image, audio=spec.audio, vocab_size=args.vocab)
    parts = _parts(args, profiled)
    positions = {part: _within(part, counts, profiled) for part in parts}
    profiled.check_widths(parts, widths)
    timer = LayerTimer(profiled, device=device, dtype=PRECISIONS[args.precision])
    kinds: list[FittedKind] = []
    with _bar() as bar:
        for part in parts:
            task = bar.add_task(part, total=args.repeats + 1)
            times: list[KindTimes] = []
            for times in timer.rounds(part, positions[part], widths, args.repeats):  # noqa: B007  (the last round has the medians)
                bar.advance(task)
            kinds += [FittedKind.of(of_kind) for of_kind in times]
    head: dict[str, Any] = {"model": args.model}
    if adapted := {unit: path.name for unit in ("vision", "audio", "llm") if (path := getattr(args, unit)) is not None}:
        head["huggingface"] = adapted
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    head["measured_on"] = {"device": name, "dtype": args.precision, "torch": str(torch.__version__)}
    document = profile_document(head, kinds, widths)
    return document, kinds, _checked(document, profiled, timer, args.repeats) if args.check else None


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


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


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
    return forecast, timer.whole(probes, repeats)


def _report(kinds: Sequence[FittedKind], checked: tuple[float, float] | None) -> dict[str, Any]:
    """Return the public JSON form of the fit and its errors."""
    from headrace.cli.costs.profile_fit import worst, worst_of_units

    rows = [
        {
            "unit": kind.times.part,
            "kind": kind.times.name,
            "tp": kind.times.tp,
            "positions": kind.times.positions,
            "measured_s": kind.times.forward_s,
            "fitted_s": kind.fitted_s,
            "errors": kind.errors,
            "input_gradients_s": kind.times.input_gradients_s,
            "weight_gradients_s": kind.times.weight_gradients_s,
            "rerun_s": kind.times.rerun_s,
        }
        for kind in kinds
    ]
    whole = {} if checked is None else {"whole_model": {"forecast_s": checked[0], "measured_s": checked[1]}}
    return {"kinds": rows, "worst_error": worst(kinds), "worst_error_of_a_unit": worst_of_units(kinds), **whole}


def _print(args: argparse.Namespace, kinds: Sequence[FittedKind], checked: tuple[float, float] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from headrace.cli.costs.profile_fit import worst, worst_of_units

    table = Table(title=f"Forward of one sample in one layer or end of model {args.model}", title_justify="left")
    for name in ("unit", "kind", "tp", "positions", "measured", "fitted", "error", "inputs", "weights", "re-run"):
        table.add_column(name, justify="left" if name in ("unit", "kind") else "right", no_wrap=True)
    for kind in kinds:
        times = kind.times
        for row, positions in enumerate(times.positions):
            forward = times.forward_s[row]
            ratios = (times.input_gradients_s[row], times.weight_gradients_s[row], times.rerun_s[row])
            table.add_row(
                *(("", "", "") if row else (times.part, times.name, str(times.tp))),
                f"{positions:,.0f}", f"{forward * 1e3:.3f} ms", f"{kind.fitted_s[row] * 1e3:.3f} ms", f"{kind.errors[row]:+.1%}",
                *(f"{seconds / forward:.2f} x" for seconds in ratios), end_section=row == len(times.positions) - 1,
            )  # fmt: skip
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    console.print(table)
    print("inputs, weights, re-run: times of the parts of the backward, each over the forward")
    if max(kind.times.tp for kind in kinds) > 1:
        print("tp: one slice of a layer, without the communication between slices")
    print(f"the worst error of the fit is {worst(kinds):.1%} for a kind, {worst_of_units(kinds):.1%} for a whole unit")
    if checked is not None:
        forecast, measured = checked
        words = f"forecast {forecast * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms, {forecast / measured - 1:+.1%}"
        print(f"the whole model, forward and backward of a mixed microbatch: {words}")
    print(f"coefficients: {args.out}", file=sys.stderr)
