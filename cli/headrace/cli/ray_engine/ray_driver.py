"""The driver of `headrace preprocessor --engine ray`: it attaches to a Ray cluster and keeps preprocessors running there."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from headrace import rpc
from headrace.cli.ray_engine.ray_options import RaySettings, free_port_of
from headrace.cli.scale.scaling_loop import follow, say
from headrace.cluster_token import await_token_file, check_exposure, cluster_token, is_loopback
from headrace.errors import EndpointError, UserError
from headrace.identity import PREPROCESSOR, server_identity

if TYPE_CHECKING:
    from headrace.cli.ray_engine.ray_fleet import RayFleet

NAMESPACE = "headrace"
ANSWER_S = 5.0  # that the cluster's head may take to answer
PASSED_ON = "HEADRACE_"
"""Variables whose names begin so are the preprocessors' too, but for those in `KEPT`."""
KEPT = frozenset({"HEADRACE_STORE"})
"""Which name secrets that no preprocessor needs: the store's password is in there."""


def drive(args: argparse.Namespace, settings: RaySettings, reorder_timeout_s: float) -> int:
    """Run preprocessors on a Ray cluster until SIGINT or SIGTERM, which end them in order.

    args: of `headrace preprocessor`. Raises UserError where Ray is not installed, or where the cluster could not serve trainers,
    EndpointError where no cluster or no reorder service answers, HeadraceError where preprocessors end again and again.
    """
    from headrace.jobs_client import JobsClient

    for endpoint in filter(None, (*args.endpoint.split(","), settings.listen, args.metrics)):
        rpc.check_endpoint(endpoint)
    await_token_file()
    with contextlib.suppress(KeyboardInterrupt), _attached(settings.address) as nodes, _interrupted_by_sigterm():
        check_reach(args, settings, nodes)
        rpc.await_reorder_service(args.endpoint, reorder_timeout_s)
        from headrace.cli.ray_engine.ray_fleet import RayFleet

        fleet = RayFleet(settings, passed_on(os.environ), say)
        say("attached", nodes=len(nodes), min=settings.limits.minimum, max=settings.limits.maximum)
        with _closed_whatever(fleet), JobsClient(args.endpoint) as client:
            fleet.want(settings.limits.minimum)
            follow(client, settings.limits, fleet.want, meanwhile=fleet.look_after)
    return 0


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that each preprocessor is given, which whoever reads the Ray cluster can read too."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON) and name not in KEPT}


@contextlib.contextmanager
def _attached(address: str) -> Iterator[list[str]]:
    """Attach to a cluster for the block, with the addresses of its nodes. Raises UserError or EndpointError."""
    address = address or os.environ.get("RAY_ADDRESS", "auto")
    ray = _ray()
    _check_answers(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level="WARNING", log_to_driver=True)
    except ConnectionError as err:
        what = "no Ray cluster runs on this machine" if address == "auto" else f"no Ray cluster answers at {address}"
        raise EndpointError(
            f"{what}: start one by `ray start --head`, name one by --address HOST:PORT, or, where it asks for a token of its "
            "own, set RAY_AUTH_MODE=token and have `ray get-auth-token` tell that token here, too"
        ) from err
    except (RuntimeError, ValueError) as err:
        raise UserError(f"cannot attach to the Ray cluster at {address}: {' '.join(str(err).split())}") from err
    try:
        yield [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as err:
        if err.name != "ray":
            raise
        raise UserError("--engine ray needs Ray: install it with `pip install 'headrace[ray]'`, here and on every node") from err
    return ray


def _check_answers(address: str) -> None:
    """Raise EndpointError if nobody listens at HOST:PORT, where Ray would try for a minute."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host:  # such as `auto`
        return
    if not port.isdecimal():
        raise UserError(f"--address is HOST:PORT of a Ray cluster's head, got {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as err:
        raise EndpointError(
            f"no Ray cluster answers at {address} ({err}): start one by `ray start --head`, or correct --address"
        ) from err


def check_reach(args: argparse.Namespace, settings: RaySettings, nodes: list[str]) -> None:
    """Raise UserError where preprocessors would be refused, or could not reach the reorder service."""
    listens = [settings.listen or free_port_of(node) for node in nodes]
    has_token, tls = bool(cluster_token() or args.tokens), server_identity(PREPROCESSOR) is not None
    for listen in listens:
        check_exposure(listen, has_token=has_token, tls=tls, allow_anyone=args.allow_anyone, allow_plaintext=args.allow_plaintext)
    if len(set(nodes)) > 1 and all(map(is_loopback, args.endpoint.split(","))):
        raise UserError(
            f"--endpoint {args.endpoint} is this machine only: name an address that all {len(set(nodes))} nodes of Ray reach"
        )


@contextlib.contextmanager
def _closed_whatever(fleet: RayFleet) -> Iterator[None]:
    """End the preprocessors with the block. A second Ctrl-C leaves that to Ray, which ends them with this process."""
    try:
        yield
    finally:
        say("ending", why="all preprocessors are ended in order")
        fleet.close()


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM count as Ctrl-C within the block, in which Ray is attached: it sets a handler of its own before."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
