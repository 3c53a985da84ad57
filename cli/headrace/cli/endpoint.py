"""Arguments that name the reorder service, the cluster's token and a process's papers, with the default endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_ENDPOINT = "127.0.0.1:7070"
TOKEN_HELP = "with the cluster's secret (default: $HEADRACE_CLUSTER_TOKEN_FILE, or the secret itself in $HEADRACE_CLUSTER_TOKEN)"


def add_endpoint(parser: argparse.ArgumentParser, flag: str = "--endpoint", note: str = "") -> None:
    """Add the arguments that name the reorder service, the file of the cluster's token and the folder of papers."""
    help_text = f"the reorder service{note}; several on one store: HOST:PORT,HOST:PORT (default: %(default)s)"
    parser.add_argument(flag, default=DEFAULT_ENDPOINT, metavar="HOST:PORT", help=help_text)
    add_token_file(parser, TOKEN_HELP)
    add_tls(parser)


def add_token_file(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the argument that names the file of the cluster's token, for this process and those that it starts."""
    parser.add_argument("--cluster-token-file", type=Path, metavar="FILE", help=help_text)


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the folder with the papers of this process, and of those that it starts."""
    parser.add_argument(
        "--tls",
        metavar="DIR",
        help="speak TLS only, with the ca.crt, tls.crt and tls.key in DIR, as `headrace certs` makes them (default: "
        "$HEADRACE_TLS, else plain text)",
    )


def add_allow_anyone(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-anyone`, without which no service listens beyond this machine unless it asks for a token."""
    parser.add_argument(
        "--allow-anyone",
        action="store_true",
        help="listen on other addresses than the loopback's without a cluster token, too: whoever reaches them is let in",
    )
