"""`headrace train`: the compact model on a job's batches."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.endpoint import add_endpoint
from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_endpoint(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--job", help="a job that was submitted before")
    what.add_argument("--submit", type=Path, metavar="SPEC.yaml", help="submit this job first")
    parser.add_argument("--model", choices=tuple(MODEL_SHAPES), help="named size (default: the job's)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model (default: torch's choice)")
    parser.add_argument(
        "--transport",
        choices=("auto", "grpc", "shared_memory"),
        default="auto",
        help="how parts come; auto: through shared memory where a preprocessor is on this host (default: %(default)s)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of the summary (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train to the job's end; rank 0 prints the summary."""
    import os

    from cli.client import JobsClient
    from cli.summary import print_summary, summarise
    from headrace.spec import load_spec_yaml
    from headrace.telemetry import configure_logging
    from headrace.transport.base import TRANSPORTS
    from preprocessor.sources.metadataset import expand
    from trainer.train import train

    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads must be at least 1, got {args.threads}")
    configure_logging("trainer")
    with JobsClient(args.endpoint) as client:
        job = client.submit(expand(load_spec_yaml(args.submit))) if args.submit else args.job
        transports = TRANSPORTS if args.transport == "auto" else (args.transport,)
        train(args.endpoint, job=job, model_name=args.model or "", threads=args.threads, transports=transports)
        if os.environ.get("RANK", "0") == "0":
            print_summary(summarise(client, job), args.format)
    return 0
