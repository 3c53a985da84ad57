"""Payload over real wires that break, between real processes: every sample comes all the same, and once."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace import trainer
from headrace.errors import EndpointError
from headrace.ledger import ledger_sha256
from headrace.processes import Process
from headrace.sample import LABEL_IGNORED
from tests.wire import NEAR, Wire, free_ports

pytestmark = pytest.mark.integration


def start_preprocessor(cluster: Any, *arguments: str) -> Process:
    log = cluster.folder / f"preprocessor-{len(cluster.preprocessors)}.log"
    common = ["preprocessor", "--reorder", cluster.endpoint, "--threads", "1", "--budget-mib", "64"]
    process = cluster.group.add(Process("preprocessor", [*common, *arguments], log))
    cluster.preprocessors.append(process)
    return process


@pytest.fixture
def add_preprocessor_behind_wire(cluster: Any) -> Iterator[Callable[..., Any]]:
    """(**faults) -> a Wire in front of the Flight server of a new preprocessor of the cluster."""
    with ExitStack() as stack:

        def add(**faults: Any) -> Any:
            grpc_port, flight_port = free_ports(2)
            wires = [
                Wire(f"127.0.0.1:{grpc_port}", listen=(NEAR, grpc_port)),
                Wire(f"127.0.0.1:{flight_port}", listen=(NEAR, flight_port), **faults),
            ]
            for wire in wires:
                stack.callback(wire.stop)
            listen = ["--listen", f"127.0.0.1:{grpc_port}", "--flight-port", str(flight_port)]
            start_preprocessor(cluster, *listen, "--advertise", f"{NEAR}:{grpc_port}", "--checksum").endpoint()
            return wires[1]

        yield add


def test_wires_that_are_cut_and_damage_parts_lose_nothing(
    cluster: Any, spec: Any, undisturbed: Callable[[int], str], add_preprocessor_behind_wire: Callable[..., Any]
) -> None:
    """Each connection of one brings a few parts and breaks in the middle of the next; the other one damages a label."""
    cluster.start_reorder()
    wires = [
        add_preprocessor_behind_wire(cut_after_bytes=800_000),
        add_preprocessor_behind_wire(flips=np.full(2, LABEL_IGNORED, np.int32).tobytes()),
    ]
    cluster.wait_for_preprocessors()
    job = cluster.submit(spec("disturbed", steps=8))
    assert cluster.consume(job, transports=("flight",)) == list(range(8))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)
    assert all(wire.num_faults > 0 for wire in wires)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [pytest.param(False, id="silent", marks=pytest.mark.slow), pytest.param(True, id="killed")])
def test_a_wire_that_goes_silent_in_the_middle_of_a_part_loses_nothing(
    cluster: Any, spec: Any, undisturbed: Callable[[int], str], add_preprocessor_behind_wire: Callable[..., Any], is_killed: bool
) -> None:
    """All parts are at the only preprocessor until its wire stands still; then another comes, and it may be killed as well."""
    cluster.start_reorder()
    silent = add_preprocessor_behind_wire(stall_after_bytes=1_500_000)
    job = cluster.submit(spec("disturbed", steps=8))

    def disturb(step: trainer.Step) -> None:
        if step.index == 0:
            start_preprocessor(cluster).endpoint()
            while not silent.num_faults:  # it is in the middle of one now, and no byte of it comes any more
                time.sleep(0.01)  # polls a real connection
            if is_killed:
                os.kill(cluster.preprocessors[0].pid, signal.SIGKILL)

    assert cluster.consume(job, disturb, transports=("flight",), hedge_s=1.0) == list(range(8))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)


@pytest.mark.slow
def test_a_job_whose_payload_comes_over_tls_is_the_same_job(
    cluster: Any, spec: Any, undisturbed: Callable[[int], str], tmp_path: Path
) -> None:
    chain, key = certify(tmp_path)
    cluster.start_reorder()
    start_preprocessor(cluster, "--tls-cert", str(chain), "--tls-key", str(key))
    job = cluster.submit(spec("secret", steps=8))
    with pytest.raises(EndpointError, match=r"speaks TLS only: name the CA of its certificate with --tls-ca \(tls_ca=\)"):
        cluster.consume(job)
    assert cluster.consume(job, transports=("flight",), tls_ca=chain) == list(range(8))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)


def certify(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 that is its own CA, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "preprocessor")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain_path, key_path = folder / "preprocessor.crt", folder / "preprocessor.key"
    chain_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    unencrypted = serialization.NoEncryption()
    key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted))
    return chain_path, key_path
