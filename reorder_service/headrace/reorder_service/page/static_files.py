"""The files of the page, read once: a path that is not among them does not exist.

Each is there twice: below a path that names what all of them contain, which browsers keep and do not ask for again, and below the
one that it has in the folder.
"""

from __future__ import annotations

import gzip
import hashlib
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


_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}


def static_answers(folder: Path = STATIC, *, packed: bool = False) -> dict[str, Answer]:
    """Return the answer to each path that the files of a folder have: /static/NAME, /static/CONTENT/NAME, and / for its INDEX.

    INDEX names the others by CONTENT, a digest of all. Files of other kinds than CONTENT_TYPES, and hidden ones, are left out.
    packed: gzipped, a third of the bytes.
    """
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if _is_served(path)}
    content = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    more = {**_PAGE_HEADERS, "Content-Encoding": "gzip"} if packed else _PAGE_HEADERS
    answers = {}
    for name, body in files.items():
        if name == INDEX:
            body = body.replace(b'"static/', f'"static/{content}/'.encode())
        sent, kind = gzip.compress(body, mtime=0) if packed else body, CONTENT_TYPES[Path(name).suffix]
        answers[f"/static/{name}"] = Answer.of(sent, kind, more=more)
        answers[f"/static/{content}/{name}"] = Answer.of(sent, kind, more=more | _FOREVER)
    if (index := answers.get(f"/static/{INDEX}")) is not None:
        answers["/"] = index
    return answers


def _is_served(path: Path) -> bool:
    return path.is_file() and path.suffix in CONTENT_TYPES and not path.name.startswith(".")
