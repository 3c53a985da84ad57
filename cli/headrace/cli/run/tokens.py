"""`headrace tokens`: make a folder of tokens, one for each role."""

from __future__ import annotations

import argparse
from pathlib import Path

_WHOSE = {
    "submit": "who submits, changes, cancels and deletes jobs: `headrace job`",
    "train": "trainers; one that submits jobs or evaluates has its token in `submit`, too",
    "preprocess": "preprocessors, which take the file `train` by --tokens to know trainers; the token of `headrace preprocessor "
    "--engine ray` stands in `watch`, too, and that of `headrace.ray.submit` in `submit`",
    "watch": "who only looks: `headrace top`, `audit`, `replay`, `scale`, `doctor`, `job list`, `job show`",
}
_EPILOG = """\
examples:
  headrace tokens tokens
  headrace reorder --tokens tokens
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace tokens`."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="gets the files submit, train, preprocess and watch, each with a random token; those that are there stay",
    )


def run(args: argparse.Namespace) -> int:
    """Make the files that are not there yet, and print which process gets which. No token is printed."""
    from headrace.token_folder import make_tokens

    for path in make_tokens(args.folder):
        print(f"{path}: {_WHOSE[path.name]}")
    print(
        f"start `headrace reorder --tokens {args.folder}`, and every other process with HEADRACE_CLUSTER_TOKEN_FILE=FILE "
        "or --cluster-token-file FILE, the file of its role"
    )
    return 0
