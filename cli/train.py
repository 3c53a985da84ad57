"""`headrace train`: the compact model on a job's batches."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.endpoint import add_endpoint
from cli.log_format import add_log_format
from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES

TRANSPORTS = ("auto", "shared_memory", "ucx", "flight")
"""auto, and those of headrace.transport.base, which takes a moment to import."""


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
        choices=TRANSPORTS,
        default="auto",
        help="how parts come; auto: through shared memory where a preprocessor is on this host, else by UCX where both have it, "
        "else by Arrow Flight (default: %(default)s)",
    )
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="the CA, in PEM, of preprocessors that speak TLS (default: they do not)"
    )
    parser.add_argument(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help="serve Prometheus metrics there, a rank at PORT plus its local rank; port 0 takes a free one (default: off)",
    )
    add_log_format(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of the summary (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train to the job's end; rank 0 prints the summary."""
    import os

    from cli.client import JobsClient
    from cli.summary import print_summary, summarise
    from headrace import metrics, tracing
    from headrace.spec import load_spec_yaml
    from headrace.telemetry import configure_logging
    from headrace.transport import base
    from preprocessor.sources.metadataset import expand

    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads must be at least 1, got {args.threads}")
    configure_logging("trainer", args.log_format)
    with JobsClient(args.endpoint) as client:
        from trainer.train import train  # takes three seconds, which a wrong argument need not wait for

        job = client.submit(expand(load_spec_yaml(args.submit))) if args.submit else args.job
        transports = base.TRANSPORTS if args.transport == "auto" else (args.transport,)
        with metrics.exported(metrics_of_rank(args.metrics), metrics.TRAINER), tracing.exported("trainer"):
            train(
                args.endpoint,
                job=job,
                model_name=args.model or "",
                threads=args.threads,
                transports=transports,
                tls_ca=args.tls_ca,
            )
        if os.environ.get("RANK", "0") == "0":
            print_summary(summarise(client, job), args.format)
    return 0


def metrics_of_rank(listen: str) -> str:
    """The address of this rank's metrics. Raises EndpointError."""
    import os

    from headrace.rpc import check_endpoint

    if not listen or check_endpoint(listen).endswith(":0"):
        return listen
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + int(os.environ.get('LOCAL_RANK', '0'))}"
