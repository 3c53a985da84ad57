"""HTTPS for the page, with the service's own papers. Browsers are asked for no certificate: they send a token."""

from __future__ import annotations

import logging
import ssl
from typing import Any

from headrace.identity import CHAIN, KEY, Identity, Papers
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)


def https_context(identity: Identity) -> ssl.SSLContext:
    """Return the context of a server that shows each new client the papers of that moment. Raises OSError for papers that are
    replaced while they are read."""
    shown = identity.present()
    context = _context(shown)
    latest = context

    def renew(connection: Any, _name: str | None, _context_of_now: ssl.SSLContext) -> None:
        nonlocal shown, latest
        if (papers := identity.present()) is not shown:
            try:
                shown, latest = papers, _context(papers)
            except OSError as err:  # the files are being replaced: the next client sees the new ones
                log.warning("page: papers are not renewed %s", pairs(reason=err))
        connection.context = latest

    context.sni_callback = renew
    return context


def _context(papers: Papers) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(papers.folder / CHAIN, papers.folder / KEY)
    return context
