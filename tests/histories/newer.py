"""Messages as a newer release would send them: each, also within others, has a field that this release does not know."""

from __future__ import annotations

import json

from google.protobuf.message import Message

_FIELD = b"\xc0\x3e\x01"  # field 1000, a varint of 1


def with_a_field_more(message: Message) -> None:
    """Add an unknown field to a message and to all in it, and an unknown key to the job specs that leaders send."""
    for field, value in message.ListFields():
        if field.name == "spec_json" and message.DESCRIPTOR.name != "SubmitRequest":
            message.spec_json = json.dumps({**json.loads(value), "later": {"a": 1}})
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for item in value if field.is_repeated else [value]:
            with_a_field_more(item)
    message.MergeFromString(_FIELD)
