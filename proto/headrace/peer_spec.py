"""Job specs that another process has sent or stored, which may be of a newer release than this one.

Users' own specs are read by headrace.spec, which refuses what it does not know. Here it is ignored where that is safe.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.errors import SpecError
from headrace.spec import JobSpec, load_spec_json
from headrace.user_document import Document, parse_json, parse_peer_json

SAMPLE_FIELDS = ("sources", "image", "audio", "text")
"""The fields of a job spec by which preprocessors make samples of records."""


def load_peer_spec_json(text: str, carried_out: Collection[str] = ()) -> JobSpec:
    """Return the job spec in the JSON text that another process sent, perhaps one of a newer release.

    Fields that this release does not know are ignored, except within the fields `carried_out` (`parse_peer_json`). Raises
    SpecError if the text is no valid spec.
    """
    return parse_peer_json(JobSpec, text, "job spec", carried_out)


def load_stored_json(kind: type[Document], text: str, what: str, chosen: str) -> Document:
    """Return a job spec, or a section of one, that a reorder service of this release or of another one has stored.

    `text`: the document with every field. `chosen`: the whole job's spec without fields that have the writer's defaults; empty:
    an older release has not written it. What `text` has besides, by a newer release's defaults, means what is done without it.

    Raises SpecError, which calls the document `what`, if it is not valid, or if the job uses a field that this release does not
    know.
    """
    if not chosen:
        return parse_json(kind, text, what)
    try:
        load_spec_json(chosen)
    except SpecError as err:
        raise SpecError(f"{err}; if a newer release has written it, run that one again") from err
    return parse_peer_json(kind, text, what)
