"""How the tests of this room write samples down."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Image, Sample, Text, to_sample
from headrace.quarantine import BadSampleError


def sample(fields: dict[str, Any], members: tuple[str, ...] = (), **mapping: Any) -> Sample:
    """The sample of a record in which every medium's bytes are its name."""
    return to_sample(Record(key="k", fields=fields, members=members, load=str.encode), MappingSpec(**mapping))


def said(fields: dict[str, Any], members: tuple[str, ...] = (), **mapping: Any) -> list[str]:
    """`ROLE: CONTENT` of each turn: images as "[NAME]", recordings as "(NAME)", masked text as "~TEXT~"."""

    def shown(segment: Any) -> str:
        if isinstance(segment, Text):
            return segment.text if segment.learnt else f"~{segment.text}~"
        name = segment.data.decode("latin-1")
        return f"[{name}]" if isinstance(segment, Image) else f"({name})"

    return [f"{turn.role}: " + "".join(map(shown, turn.segments)) for turn in sample(fields, members, **mapping).turns]


def refusal(fields: dict[str, Any], members: tuple[str, ...] = (), **mapping: Any) -> str:
    """`REASON: DETAIL`"""
    with pytest.raises(BadSampleError) as caught:
        sample(fields, members, **mapping)
    return str(caught.value)


def asked(content: Any, answer: Any = "A barn.", **fields: Any) -> dict[str, Any]:
    """A record with one question and its answer as messages."""
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **fields}
