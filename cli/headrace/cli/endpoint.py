"""Arguments that name the reorder service, tokens and papers, and say to whom a service is open; the default endpoint of all."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from headrace.cli.former_names import also_called

DEFAULT_ENDPOINT = "127.0.0.1:7070"
ENDPOINT = "HEADRACE_ENDPOINT"
"""The variable of the environment that names the reorder service where no argument does."""
TOKEN_HELP = (
    "with the cluster's secret, or that of this process's role (default: $HEADRACE_CLUSTER_TOKEN_FILE, or the secret itself in "
    "$HEADRACE_CLUSTER_TOKEN)"
)


def add_endpoint(
    parser: argparse.ArgumentParser, *, note: str = "", otherwise: str | None = DEFAULT_ENDPOINT, without: str = ""
) -> None:
    """Add a group of the arguments that name the reorder service, the file of the cluster's token and the folder of papers.

    `note`, `otherwise`, `without`: as for `name_endpoint`.
    """
    group = parser.add_argument_group("reorder service")
    name_endpoint(group, note=note, otherwise=otherwise, without=without)
    add_token_file(group, TOKEN_HELP)
    add_tls(group)


def name_endpoint(
    parser: argparse._ActionsContainer,
    *,
    what: str = "the reorder service",
    note: str = "",
    otherwise: str | None = DEFAULT_ENDPOINT,
    without: str = "",
) -> None:
    """Add the argument `--endpoint` alone.

    `what`, `note`: of what it is, in its help. `otherwise`: its value where neither an argument nor the environment names one;
    None: the help says `without`, what is done then.
    """
    last = without if otherwise is None else otherwise
    parser.add_argument(
        "--endpoint",
        default=os.environ.get(ENDPOINT, "").strip() or otherwise,
        metavar="HOST:PORT",
        help=f"{what}{note}; several on one store: HOST:PORT,HOST:PORT (default: ${ENDPOINT}, else {last})",
    )
    also_called(parser, "--endpoint", "--reorder")


def add_token_file(parser: argparse._ActionsContainer, help_text: str) -> None:
    """Add the argument that names the file of the cluster's token, for this process and those that it starts."""
    parser.add_argument("--cluster-token-file", type=Path, metavar="FILE", help=help_text)


def add_tls(parser: argparse._ActionsContainer) -> None:
    """Add the argument that names the folder with the papers of this process, and of those that it starts."""
    parser.add_argument(
        "--tls",
        metavar="DIR",
        help="speak TLS only, with the ca.crt, tls.crt and tls.key in DIR, as `headrace certs` makes them (default: "
        "$HEADRACE_TLS, else plain text)",
    )


def add_doors(parser: argparse._ActionsContainer, whose: str) -> None:
    """Add the arguments that say who is let into a service: `--tokens`, `--allow-anyone` and `--allow-plaintext`.

    `whose`: of whom the service lets in those with a token of their role.
    """
    parser.add_argument(
        "--tokens",
        type=Path,
        default=os.environ.get("HEADRACE_TOKENS") or None,
        metavar="DIR",
        help=f"with files of tokens, named by role: {whose}; `headrace tokens DIR` makes them (default: $HEADRACE_TOKENS)",
    )
    parser.add_argument(
        "--allow-anyone",
        action="store_true",
        help="listen on other addresses than the loopback's without a cluster token, too: whoever reaches them is let in",
    )
    parser.add_argument(
        "--allow-plaintext",
        action="store_true",
        help="listen on other addresses than the loopback's without TLS, too: whoever reads the network reads tokens and data",
    )
