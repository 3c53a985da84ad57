"""Command-line options that say which model costs are estimated for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.costs.dataset_costs import DEFAULT_MODEL, DEFAULT_UNITS, Estimator
from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES

if TYPE_CHECKING:
    from headrace.spec import JobSpec

MODEL_OPTIONS = ("model", "units", "coefficients")


def add_model_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options --model, --units and --coefficients, which costs are estimated from."""
    parser.add_argument("--model", metavar="NAME", help=f"its size: {', '.join(MODEL_SHAPES)} (default: {DEFAULT_MODEL})")
    parser.add_argument(
        "--units",
        metavar="UNIT,...",
        help=f"encoder,llm or any of vision,audio,llm; and generator where the model has one (default: {DEFAULT_UNITS})",
    )
    parser.add_argument(
        "--coefficients", type=Path, metavar="FILE", help="a file of `headrace profile`: times of layers (default: counted work)"
    )


def refuse_options(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise UserError, with `why`, if one of the named options is given although it would have no effect."""
    for name in names:
        if getattr(args, name) not in (None, "", []):
            raise UserError(f"--{name.replace('_', '-')} {why}")


def check_inspected(args: argparse.Namespace) -> None:
    """Raise UserError if `headrace inspect` would ignore an option, or its path is a cost table instead of a data set."""
    from headrace.cli.costs.cost_table import is_cost_table

    if not args.costs:
        refuse_options(args, MODEL_OPTIONS, "says what costs are estimated from, so it needs --costs FILE")
    if args.spec is None and args.path is not None and is_cost_table(args.path):
        raise UserError(f"{args.path} is a cost table, not a data set; `headrace plan`, `simulate` and `compare` read it")


def estimator_of(args: argparse.Namespace, spec: JobSpec, vocab: int) -> Estimator:
    """Return the estimator that the options of `add_model_arguments` describe. Raises UserError.

    vocab: size of the tokenizer's vocabulary.
    """
    model, units = args.model or DEFAULT_MODEL, args.units or DEFAULT_UNITS
    return Estimator(spec, vocab, model=model, units=units, coefficients=args.coefficients)
