"""Which shards of a data set are for training, by the splits that their names tell.

A name tells a split by one of the usual words, between separators: "data/train-00000-of-00002.parquet", "val/0.tar",
"train_sft-0.jsonl" (the split `train_sft`). A README.md of the Hugging Face Hub may say it instead (hub_card.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from headrace.errors import DatasetError

ALL = "all"
_TRAIN = "train"
_KINDS = {
    **dict.fromkeys(("train", "training"), _TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORDS = "|".join(sorted(_KINDS, key=len, reverse=True))
_SPLIT = re.compile(rf"(?:^|[-_./])(({_WORDS})(?:_[a-z]+)*)(?=[-_./0-9]|$)", re.IGNORECASE)
_NUMBERED = re.compile(r"-\d+-of-\d+")
_MOST_SHOWN = 8


def split_of(name: str) -> str:
    """Return the split that a shard's name tells, in lower case, such as "train_sft"; "" where it tells none."""
    found = _SPLIT.search(name)
    return found[1].lower() if found else ""


def choose_split(
    names: Sequence[str], where: str, wanted: str | None, split: Callable[[str], str], tell: Callable[[str], None]
) -> list[str]:
    """Return the shards of the wanted split; without one, those of the only training split beside evaluation splits, or all.

    `where` is the data set in messages, `split` gives the split of a name. `tell` is called with a sentence where shards are
    left out that nobody has asked to leave out. Raises DatasetError, which lists the splits, where it is not certain what is
    meant.
    """
    if wanted == ALL:
        return list(names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(split(name), []).append(name)
    if wanted is not None:
        return _wanted(names, groups, where, wanted)
    if len(groups) < 2 or not any(_kind(label) not in ("", _TRAIN) for label in groups):
        return list(names)
    training = [label for label in groups if _kind(label) == _TRAIN]
    if len(training) != 1 or "" in groups:
        known = [label for label in (training or groups) if label]
        raise DatasetError(
            f"{where} holds shards of several splits, {_listed(groups)}: choose one with the source's split, for example "
            f"`split: {min(known)}` (`split: {ALL}` takes every shard), or name its files"
        )
    left = {label: group for label, group in groups.items() if label != training[0]}
    tell(
        f"{where}: takes the split {training[0]} ({len(groups[training[0]])} of {len(names)} shards), and leaves "
        f"{_listed(left)}; `split:` in the source chooses another one"
    )
    return groups[training[0]]


def _wanted(names: Sequence[str], groups: dict[str, list[str]], where: str, wanted: str) -> list[str]:
    """Return the shards of the split of that name, of those of its kind (`val` is `validation`), or that a path's part names."""
    kind = _KINDS.get(wanted.lower())
    chosen = (
        groups.get(wanted)
        or groups.get(wanted.lower())
        or [name for label, group in groups.items() if kind and _kind(label) == kind for name in group]
        or [name for name in names if wanted in _parts(name)]
    )
    if not chosen:
        raise DatasetError(f"{where} has no split {wanted!r}; there are {_listed(groups)}")
    return chosen


def _kind(label: str) -> str:
    """Return `train`, `validation` or `test` for a split; "" for one that its name does not tell to be one of these."""
    found = _SPLIT.search(label)
    return _KINDS[found[2].lower()] if found else ""


def _parts(name: str) -> list[str]:
    *folders, last = name.split("/")
    return [*folders, _NUMBERED.split(last)[0], last.partition(".")[0]]


def _listed(groups: dict[str, list[str]]) -> str:
    shown = sorted(groups)[:_MOST_SHOWN]
    more = f" and {len(groups) - len(shown)} more" if len(groups) > len(shown) else ""
    return ", ".join(f"{label or 'no split'} ({min(groups[label])})" for label in shown) + more
