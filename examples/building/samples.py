"""A sample as members of a tar shard, each with its origins; the licences that are admitted; shards and ATTRIBUTION.csv."""

from __future__ import annotations

import csv
import io
import itertools
import json
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ATTRIBUTION = "ATTRIBUTION.csv"
COLUMNS = ("file", "member", "origin_kind", "origin_package", "origin_version", "origin_path", "licence", "change")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One thing a member was made from: a row of ATTRIBUTION.csv without its place."""

    origin_kind: str
    origin_package: str
    origin_version: str
    origin_path: str
    licence: str
    change: str

    @property
    def admitted(self) -> bool:
        """CC0, public domain, or CC-BY without further conditions."""
        if self.licence.startswith("CC-BY-"):
            return self.licence.removeprefix("CC-BY-")[0].isdigit()
        return self.licence == "CC0-1.0" or self.licence.startswith("public-domain")


def drawn(change: str) -> Origin:
    """The origin of what was made for the example and nothing else."""
    return Origin(
        origin_kind="generated", origin_package="generated", origin_version="1", origin_path="-", licence="CC0-1.0", change=change
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One file of a sample. `suffix` is its name after the key and the dot ("jpg", "2.webp")."""

    suffix: str
    content: bytes
    origins: tuple[Origin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Media members and the annotation, which comes last."""

    key: str
    media: tuple[Member, ...]
    annotation: Member

    @property
    def members(self) -> tuple[Member, ...]:
        """All members in the order of the shard."""
        return (*self.media, self.annotation)

    @property
    def num_bytes(self) -> int:
        """Bytes of all members, without the shard's headers."""
        return sum(len(member.content) for member in self.members)

    @property
    def admitted(self) -> bool:
        """Every member has at least one origin, and every origin of every member is admitted."""
        return all(member.origins and all(origin.admitted for origin in member.origins) for member in self.members)

    def fields(self) -> dict[str, Any]:
        """The annotation, parsed."""
        document: dict[str, Any] = json.loads(self.annotation.content)
        return document


def composed(key: str, media: Sequence[Member], fields: Mapping[str, Any], origins: Sequence[Origin]) -> Sample:
    """A sample whose annotation is written for the example."""
    content = json.dumps(fields, ensure_ascii=False).encode()
    return Sample(key=key, media=tuple(media), annotation=Member(suffix="json", content=content, origins=tuple(origins)))


def read_samples(folder: Path, data_set: str) -> Iterator[Sample]:
    """Samples of FOLDER/DATA_SET/*.tar with their origins.

    An annotation without rows of its own holds words about the media beside it and takes over their origins.
    """
    origins = _origins(folder / ATTRIBUTION)
    for path in sorted((folder / data_set).glob("*.tar")):
        file = f"{data_set}/{path.name}"
        with tarfile.open(path) as tar:
            for key, infos in itertools.groupby(tar, key=lambda info: info.name.partition(".")[0]):
                members = [
                    Member(suffix=info.name.partition(".")[2], content=_content(tar, info), origins=origins[file, info.name])
                    for info in infos
                ]
                yield _sample(f"{data_set.removesuffix('-like')}-{key}", members)


def _sample(key: str, members: list[Member]) -> Sample:
    *media, annotation = members
    if not annotation.origins:
        inherited = dict.fromkeys(replace(origin, change="annotation") for member in media for origin in member.origins)
        annotation = replace(annotation, origins=tuple(inherited))
    return Sample(key=key, media=tuple(media), annotation=annotation)


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(info)
    if stream is None:
        raise ValueError(f"{tar.name!s}: {info.name} is not a file")
    return stream.read()


def _origins(path: Path) -> defaultdict[tuple[str, str], tuple[Origin, ...]]:
    found: defaultdict[tuple[str, str], tuple[Origin, ...]] = defaultdict(tuple)
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            found[row.pop("file"), row.pop("member")] += (Origin(**row),)
    return found


def write_shards(folder: Path, shards: Mapping[str, Iterable[Sample]]) -> None:
    """Write NAME.tar for each entry, byte for byte the same for the same samples, and ATTRIBUTION.csv for all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ATTRIBUTION).open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(COLUMNS)
        for name, samples in shards.items():
            file = f"{name}.tar"
            with tarfile.open(folder / file, "w", format=tarfile.USTAR_FORMAT) as tar:
                for sample in samples:
                    for member in sample.members:
                        member_name = f"{sample.key}.{member.suffix}"
                        info = tarfile.TarInfo(member_name)  # its defaults: no owner, mode 644, time 0
                        info.size = len(member.content)
                        tar.addfile(info, io.BytesIO(member.content))
                        rows.writerows((file, member_name, *_row(origin)) for origin in member.origins)


def _row(origin: Origin) -> tuple[str, ...]:
    return tuple(getattr(origin, column) for column in COLUMNS[2:])
