"""What a source takes of an Energon data set: the part of its path behind the "#".

    #val                        the split; the default is `train`
    #split=val&dataset_config=ocr.yaml&split_config=other.yaml
    #share=0.0,0.5              the first half of the split's samples
    #rows=1000,end              its samples from the one numbered 1000 on; with a share, that share of these rows
    #join=...&joiner=OCRSample  joined by key with another data set: NONMATCH,PATH (both with their own options; quoted)
    #aux=...                    where media are that the samples name and do not have: a data set, or filesystem://FOLDER (quoted)

The last four are what metadatasets say (metadataset.py writes such paths).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, quote

from headrace.errors import DatasetError
from headrace.source_spec import SourceSpec

NONMATCHES = ("error", "skip", "none")
_NAMES = ("split", "dataset_config", "split_config")
_OPTIONS = frozenset((*_NAMES, "rows", "share", "join", "joiner", "aux"))
_ROWS = re.compile(r"(\d{1,18}),(\d{1,18}|end)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A data set whose fields are added to those of another one, sample by sample with the same key."""

    selection: Selection
    nonmatch: str = "error"
    """What becomes of a sample without a match: "error" refuses the data set, "skip" leaves it out, "none" adds no field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The folder of a data set, its split and its configuration files, and which samples are taken with what beside them."""

    root: str
    split: str = "train"
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    rows: tuple[int, int | None] | None = None
    """First sample and the one behind the last, None for the end, in the order of the split; None: all."""
    share: tuple[float, float] | None = None
    """Where the samples begin and end, as parts of `rows`, from 0 to 1; None: all."""
    joined: tuple[Joined, ...] = ()
    joiner: str = ""
    """Name of the class of Energon that joined samples have."""
    aux: tuple[str, ...] = ()
    """Places of media beside the samples: a data set's folder, or "filesystem://" and a folder."""

    @property
    def is_part(self) -> bool:
        """Whether only some samples of the split are taken."""
        return self.rows is not None or self.share is not None

    def bounds(self, num_samples: int, what: str) -> tuple[int, int]:
        """Return the first sample and the one behind the last, of a split of `num_samples`, which errors call `what`.

        Shares are rounded as Energon does. Raises DatasetError where the rows are not there.
        """
        start, end = self.rows or (0, None)
        end = num_samples if end is None else end
        if not start <= end <= num_samples:
            raise DatasetError(f"{what} has {num_samples} samples, and none from {start} to {end}: correct the subset's range")
        if self.share is not None:
            length = end - start
            end = start + int(length * self.share[1])
            start += int(length * self.share[0])
        return start, end

    def path(self) -> str:
        """Return the source path that `parse_selection` would parse to this selection."""
        options = [] if self.root.endswith(".jsonl") else [(name, getattr(self, name)) for name in _NAMES]
        if self.rows is not None:
            options.append(("rows", f"{self.rows[0]},{'end' if self.rows[1] is None else self.rows[1]}"))
        if self.share is not None:
            options.append(("share", f"{self.share[0]!r},{self.share[1]!r}"))
        options += [("join", f"{joined.nonmatch},{joined.selection.path()}") for joined in self.joined]
        options += [("joiner", self.joiner)] if self.joiner else []
        options += [("aux", place) for place in self.aux]
        fragment = "&".join(f"{name}={quote(value, safe=',')}" for name, value in options)
        return f"{self.root}#{fragment}" if fragment else self.root


def parse_selection(path: str) -> Selection:
    """Parse a source's path, with the options after its "#". Raises DatasetError where an option is unknown.

    A path is taken literally where a file or folder has that name, "#" included, or what follows the "#" looks like a path.
    """
    root, _, fragment = path.partition("#")
    if "/" in fragment or "." in fragment.partition("=")[0] or os.path.exists(path):
        return Selection(root=path)
    if "=" not in fragment:
        return Selection(root=root, split=fragment or "train")
    options = parse_qsl(fragment)
    unknown = dict(options).keys() - _OPTIONS
    if unknown:
        raise DatasetError(f"{path}: after '#' stand split, dataset_config and split_config, not {', '.join(sorted(unknown))}")
    last = dict(options)
    return Selection(
        root=root,
        **{name: last[name] for name in _NAMES if name in last},
        rows=_rows(last["rows"], path) if "rows" in last else None,
        share=_share(last["share"], path) if "share" in last else None,
        joined=tuple(_joined(value, path) for name, value in options if name == "join"),
        joiner=last.get("joiner", ""),
        aux=tuple(value for name, value in options if name == "aux"),
    )


def selection_of(source: SourceSpec) -> Selection:
    """Return what a source's path and its field `split` select. Raises DatasetError where they name different splits."""
    selection = parse_selection(source.path)
    if source.split is None:
        return selection
    if selection.split not in ("train", source.split):
        raise DatasetError(f"{source.path} and `split: {source.split}` name different splits; name one of them")
    return replace(selection, split=source.split)


def _rows(text: str, path: str) -> tuple[int, int | None]:
    found = _ROWS.fullmatch(text)
    if found is None:
        raise DatasetError(f"{path}: rows are two numbers of samples, such as 0,1000 or 1000,end; got {text!r}")
    return int(found[1]), None if found[2] == "end" else int(found[2])


def _share(text: str, path: str) -> tuple[float, float]:
    try:
        start, end = map(float, text.split(","))
    except ValueError:
        start, end = -1.0, -1.0
    if not 0 <= start <= end <= 1:
        raise DatasetError(f"{path}: a share is two numbers from 0 to 1, such as 0.0,0.5; got {text!r}")
    return start, end


def _joined(text: str, path: str) -> Joined:
    nonmatch, _, other = text.partition(",")
    if nonmatch not in NONMATCHES or not other:
        raise DatasetError(f"{path}: join is one of {', '.join(NONMATCHES)}, a comma and a quoted path; got {text!r}")
    return Joined(selection=parse_selection(other), nonmatch=nonmatch)
