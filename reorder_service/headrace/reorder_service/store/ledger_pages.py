"""Pages of the ledger: the records of some consecutive committed steps as one short text, for which it does no I/O.

A large job commits thousands of names a step, so a list with an entry a step would take 30 to 60 bytes a sample for good. In a
page the names of all its steps are sorted together, with the step of each beside it: neighbours then differ in a few characters,
and are compressed to about a byte a sample where keys count up, plus 6 bits for the step. The names are kept, and not only what
the global order says of them, because the audit compares the two.

Each page has a SHA-256 over the former page's and its own content, so that the last digest vouches for all of them.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ConflictError
from headrace.reorder_service.store.progress import Progress, StepRecord

PAGE_STEPS = 64
"""Most steps of a page: the column of steps has one byte a name, and 64 make 6 bits of it."""
PAGE_SAMPLES = 1 << 18
"""About how many samples a page has at most, if that is more than one step: some 10 MB of names, and a third of a megabyte."""
_LEVEL = 9  # of Zstandard: half a second for a full page; 3 takes a tenth of it and a fifth more bytes


def steps_per_page(global_batch: int) -> int:
    """Return how many steps of a job go into a page of its ledger."""
    return max(1, min(PAGE_STEPS, PAGE_SAMPLES // global_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPage:
    """The records of consecutive steps, from step `first` on."""

    first: int
    records: tuple[StepRecord, ...]
    before: Progress
    """Sums over all steps before `first`."""
    former: str
    """Digest of the page before; empty for the first page."""
    digest: str
    """SHA-256, in hexadecimal digits, of `former` and the content of this page."""

    @classmethod
    def of(cls, first: int, records: Sequence[StepRecord], before: Progress, former: str) -> tuple[LedgerPage, str]:
        """Return a page of at most PAGE_STEPS records, and its text for the store."""
        content = _content(first, records, before)
        digest = _digest(former, content)
        page = cls(first=first, records=tuple(records), before=before, former=former, digest=digest)
        packed = pa.Codec("zstd", compression_level=_LEVEL).compress(content, asbytes=True)
        fields = {"first": first, "former": former, "digest": digest, "bytes": len(content)}
        return page, json.dumps({**fields, "zstd": base64.b64encode(packed).decode()})

    @classmethod
    def read(cls, text: str) -> LedgerPage:
        """Return the page with this text. Raises ConflictError where the text is not what `of` has returned."""
        try:
            fields = json.loads(text)
            packed = base64.b64decode(fields["zstd"], validate=True)
            content = pa.Codec("zstd").decompress(packed, fields["bytes"], asbytes=True)
            if _digest(fields["former"], content) != fields["digest"]:
                raise ValueError("its digest does not fit its content")
            first, records, before = _parsed(content)
        except (ValueError, KeyError, TypeError, OSError) as err:
            raise ConflictError(f"a page of the ledger is damaged ({err}): restore the store from a copy") from err
        return cls(first=first, records=records, before=before, former=fields["former"], digest=fields["digest"])

    @property
    def stop(self) -> int:
        """The step after the last one of the page."""
        return self.first + len(self.records)

    def progress(self, step: int) -> Progress:
        """Return the sums over all steps of the job before `step`, one of `first` to `stop`."""
        return functools.reduce(Progress.after, self.records[: step - self.first], self.before)


def _digest(former: str, content: bytes) -> str:
    return hashlib.sha256(former.encode() + content).hexdigest()


def _content(first: int, records: Sequence[StepRecord], before: Progress) -> bytes:
    """Return a page's content: a line of JSON, then of n sorted names the steps (n bytes), lengths (n uint32) and characters."""
    assert len(records) <= PAGE_STEPS
    names = pa.array([name for record in records for name in record.samples], pa.large_string())
    steps = np.repeat(np.arange(len(records), dtype=np.uint8), [len(record.samples) for record in records])
    order = pc.sort_indices(names).to_numpy()
    names = names.take(order)
    lengths = pc.binary_length(names).to_numpy(zero_copy_only=False).astype("<u4")
    of_steps = [{name: value for name, value in asdict(record).items() if name != "samples"} for record in records]
    line = {"first": first, "before": asdict(before), "names": len(names), "records": of_steps}
    columns = steps[order].tobytes(), lengths.tobytes(), names.buffers()[2].to_pybytes()[: lengths.sum(dtype=np.int64)]
    return b"".join((json.dumps(line, ensure_ascii=False).encode(), b"\n", *columns))


def _parsed(content: bytes) -> tuple[int, tuple[StepRecord, ...], Progress]:
    """Return the first step, the records, and the sums before them, of a page's content."""
    line, _, columns = content.partition(b"\n")
    fields = json.loads(line)
    count = fields["names"]
    steps = np.frombuffer(columns, np.uint8, count)
    offsets = np.concatenate(([0], np.frombuffer(columns, "<u4", count, count).cumsum(dtype=np.int64)))
    names = pa.LargeStringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(columns[5 * count :]))
    in_steps = names.take(np.argsort(steps, kind="stable")).to_pylist()
    ends = [0, *accumulate(np.bincount(steps, minlength=len(fields["records"])).tolist())]
    records = tuple(
        StepRecord.of_document({**record, "samples": in_steps[ends[n] : ends[n + 1]]})
        for n, record in enumerate(fields["records"])
    )
    return fields["first"], records, Progress.of_document(fields["before"])
