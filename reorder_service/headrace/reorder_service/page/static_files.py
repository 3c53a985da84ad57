"""The files of the page, read once: a path that is not among them does not exist."""

from __future__ import annotations

import gzip
from pathlib import Path

from headrace.reorder_service.page.answers import Answer

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/vnd.microsoft.icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}

# A page can load nothing but what comes from this server, and no other site can frame it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}


def static_answers(folder: Path = STATIC, *, packed: bool = False) -> dict[str, Answer]:
    """Return the answer to each path that the files of a folder have: /static/NAME, and / for its INDEX.

    Files of other kinds than CONTENT_TYPES, and hidden ones, are left out. packed: gzipped, a third of the bytes.
    """
    answers = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in CONTENT_TYPES and not path.name.startswith("."):
            body = gzip.compress(path.read_bytes(), mtime=0) if packed else path.read_bytes()
            more = {**_PAGE_HEADERS, "Content-Encoding": "gzip"} if packed else _PAGE_HEADERS
            answer = Answer.of(body, CONTENT_TYPES[path.suffix], more=more)
            answers[f"/static/{path.relative_to(folder).as_posix()}"] = answer
    if (index := answers.get(f"/static/{INDEX}")) is not None:
        answers["/"] = index
    return answers
