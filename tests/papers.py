"""Papers for mutual TLS, made by the code of `headrace certs`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from headrace.cli.run.authority import Authority, make_papers
from headrace.identity import CHAIN, KEY

DAYS = 90


def make_cluster_papers(folder: Path, **options: object) -> Path:
    """`folder`, with the papers of each kind of process in folders of their names."""
    for _ in make_papers(folder, DAYS, **options):  # type: ignore[arg-type]
        pass
    return folder


def expire(papers: Path, authority: Authority, name: str) -> None:
    """Put a certificate in the place of the papers' that expired an hour ago."""
    chain, key = authority.certify(name, datetime.now(UTC) - timedelta(days=2), timedelta(days=2, hours=-1))
    (papers / KEY).write_bytes(key)
    (papers / CHAIN).write_bytes(chain)


def serial_number(papers: Path) -> int:
    """That of the certificate in the papers."""
    return x509.load_pem_x509_certificate((papers / CHAIN).read_bytes()).serial_number
