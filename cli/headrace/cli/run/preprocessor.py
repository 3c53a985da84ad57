"""`headrace preprocessor`: run one preprocessor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.endpoint import add_doors, add_endpoint
from headrace.cli.log_format import add_log_format, add_metrics
from headrace.cli.ray_engine.ray_options import add_engine, ray_settings
from headrace.cli.run.memory import usable_memory
from headrace.cli.run.processors import usable_processors

if TYPE_CHECKING:
    from headrace.preprocessor.access import Access

DEFAULT_BUDGET_MIB = 512
DEFAULT_CACHE_GIB = 20
REORDER_TIMEOUT_S = 30.0  # services may be started in any order within this time
_EPILOG = """\
examples:
  headrace preprocessor                                   beside a reorder service on this machine
  headrace preprocessor --threads 8 --budget-mib 4096 --cache /var/cache/headrace
  headrace preprocessor --endpoint 10.0.0.1:7070 --listen 0.0.0.0:7100 --data-root /data --tls papers/preprocessor
  headrace preprocessor --engine ray --endpoint 10.0.0.1:7070 --max 32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace preprocessor`."""
    parser.epilog = _EPILOG
    add_endpoint(parser, note=f", which may also start up to {REORDER_TIMEOUT_S:.0f} s later")
    listening = parser.add_argument_group("where trainers fetch")
    listening.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where trainers fetch; port 0 takes a free one (default: %(default)s)",
    )
    listening.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="the address that trainers are told (default: the listening one; for 0.0.0.0 this machine's towards --endpoint)",
    )
    listening.add_argument(
        "--flight-port",
        type=int,
        metavar="PORT",
        help="for payload over the network, by Arrow Flight, on the host of --listen and --advertise; 0 takes a free one "
        "(default: the port after that of --listen; a free one where that is on loopback or takes a free one)",
    )
    listening.add_argument(
        "--ucx",
        action="store_true",
        help="offer payload by UCX too: RDMA where there is a fabric; unencrypted, on a free port of all addresses",
    )
    listening.add_argument(
        "--checksum",
        action="store_true",
        help="send a CRC-32 with every part: what is damaged on the way is found and fetched again",
    )
    work = parser.add_argument_group("work and memory")
    work.add_argument(
        "--threads",
        type=int,
        default=usable_processors(),
        metavar="N",
        help="worker threads (default: as many as processors may be used, by affinity and a container's quota)",
    )
    work.add_argument(
        "--budget-mib",
        type=int,
        default=DEFAULT_BUDGET_MIB,
        metavar="MIB",
        help="memory for decoded parts, shared with trainers on this machine where /dev/shm has room (default: %(default)s)",
    )
    work.add_argument(
        "--decode-mib",
        type=int,
        metavar="MIB",
        help="memory for media while they are decoded, all threads together: who needs more waits (default: half of what the "
        "container or the machine has beside --budget-mib)",
    )
    work.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="for remote shards and unpacked Parquet, shared by this host's preprocessors (default: temporary)",
    )
    work.add_argument(
        "--cache-gib",
        type=int,
        default=DEFAULT_CACHE_GIB,
        metavar="GIB",
        help="most that the cache holds: what was not read for longest goes first (default: %(default)s)",
    )
    reading = parser.add_argument_group("what jobs may read")
    reading.add_argument(
        "--data-root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="jobs may read the files below DIR; several times for several (default: see --allow-url)",
    )
    reading.add_argument(
        "--allow-url",
        action="append",
        default=[],
        metavar="PREFIX",
        help="jobs may fetch what begins with PREFIX, for example s3://bucket/; several times for several (default of both: "
        "where --listen and --endpoint are on loopback, all files of this user, and s3, gs and https; elsewhere nothing)",
    )
    reading.add_argument(
        "--allow-local-urls",
        action="store_true",
        help="jobs may fetch from this machine and its link, too, where a cloud tells machines their secrets (default: refused)",
    )
    doors = parser.add_argument_group("who is let in")
    add_doors(doors, "train, of those that fetch payload here")
    telling = parser.add_argument_group("log and metrics")
    add_log_format(telling)
    add_metrics(telling)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Run a preprocessor, or with --engine ray several on a Ray cluster, until it is interrupted."""
    if (settings := ray_settings(args)) is not None:
        from headrace.cli.ray_engine.ray_driver import drive

        return drive(args, settings, REORDER_TIMEOUT_S)
    from headrace import rpc
    from headrace.cli.run.connection_log import connections_logged
    from headrace.cli.run.serve import run_service
    from headrace.cluster_token import await_token_file, check_exposure, cluster_token
    from headrace.errors import UserError
    from headrace.identity import PREPROCESSOR, server_identity
    from headrace.token_folder import TokenFolder

    decode_mib = max(1, ((usable_memory() >> 20) - args.budget_mib) // 2) if args.decode_mib is None else args.decode_mib
    amounts = {"threads": args.threads, "budget-mib": args.budget_mib, "decode-mib": decode_mib, "cache-gib": args.cache_gib}
    if wrong := next((f"--{option} must be at least 1, got {amount:g}" for option, amount in amounts.items() if amount < 1), ""):
        raise UserError(wrong)
    for endpoint in filter(None, (*args.endpoint.split(","), args.listen, args.advertise, args.metrics)):
        rpc.check_endpoint(endpoint)
    if args.flight_port is not None and not 0 <= args.flight_port <= 65535:
        raise UserError(f"--flight-port must be a port, 0 to 65535, got {args.flight_port}")
    identity = server_identity(PREPROCESSOR)
    if args.ucx and identity is not None:
        raise UserError("--ucx does not encrypt, and --tls or HEADRACE_TLS asks for it: leave one of them away")
    await_token_file()
    token, tokens = cluster_token(), TokenFolder(args.tokens) if args.tokens else None
    check_exposure(
        args.listen,
        has_token=bool(token or tokens),
        tls=identity is not None,
        allow_anyone=args.allow_anyone,
        allow_plaintext=args.allow_plaintext,
    )
    allowed = access(args)

    from headrace.preprocessor.server import serve  # takes three seconds, which a wrong argument need not wait for
    from headrace.preprocessor.sources.cache import ShardCache, default_cache

    with connections_logged():
        rpc.await_reorder_service(args.endpoint, REORDER_TIMEOUT_S)
        cache_bytes = args.cache_gib << 30
        service = serve(
            listen=args.listen,
            reorder=args.endpoint,
            advertise=args.advertise,
            threads=args.threads,
            budget_bytes=args.budget_mib << 20,
            decode_bytes=decode_mib << 20,
            access=allowed,
            cache=ShardCache(args.cache, cache_bytes) if args.cache else default_cache(cache_bytes),
            token=token,
            tokens=tokens,
            with_checksum=args.checksum,
            flight_port=flight_port(args.listen) if args.flight_port is None else args.flight_port,
            identity=identity,
            with_ucx=args.ucx,
            metrics_listen=args.metrics,
        )
        return run_service("preprocessor", service, args.log_format)


def flight_port(listen: str) -> int:
    """Return the port for Arrow Flight beside that of --listen, so that both are known to a firewall; 0 for any free one.

    On loopback there is no firewall, and several preprocessors may listen on ports one after the other.
    """
    from headrace.cluster_token import is_loopback

    port = int(listen.rpartition(":")[2])
    return 0 if port in (0, 65535) or is_loopback(listen) else port + 1


def access(args: argparse.Namespace) -> Access:
    """Return what jobs may read through this preprocessor. Raises UserError for a folder or URL that is invalid.

    If no folder or URL is named, this is the default `Access` if --listen and --endpoint are on loopback, as jobs then come from
    somebody with an account on this machine; otherwise nothing, as they come from anybody who reaches the reorder service.
    """
    from headrace.cluster_token import is_loopback
    from headrace.preprocessor.access import NOTHING, Access

    if args.data_root or args.allow_url:
        return Access.of(args.data_root, args.allow_url, local_urls=args.allow_local_urls)
    return (
        Access(local_urls=args.allow_local_urls) if all(map(is_loopback, (args.listen, *args.endpoint.split(",")))) else NOTHING
    )
