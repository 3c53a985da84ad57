"""Metadatasets of Megatron-Energon: blends by weight or repetition, subsets, joins; and its JSONL data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.layouts.energon_layouts import CAPTIONS, ENERGON, captioned, crude, pair, prepare, put_yaml, read_set, typed, write_set
from tests.layouts.hf_folder_layouts import lines, put
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, caption, drawing, picture
from tests.layouts.plain import Sample, document, image

Split = Mapping[str, Any]


def _set(folder: Path, first: int, shards: int = 1, split: str = "1,0,0") -> None:
    numbers = [range(first + COUNT * shard, first + COUNT * (shard + 1)) for shard in range(shards)]
    write_set(folder, [[pair(number) for number in group] for group in numbers], CAPTIONS, split)


def _meta(path: Path, version: int = 2, **splits: Split) -> None:
    put_yaml(
        path,
        {"__module__": "megatron.energon", "__class__": "MetadatasetV2" if version == 2 else "Metadataset", "splits": splits},
    )


def blend(
    name: str,
    what: str,
    train: Split,
    *,
    version: int = 2,
    also: Callable[[Path], None] | None = None,
    prepared: bool = False,
    **others: Any,
) -> Layout:
    """Return the layout of two data sets, `a` and `b`, under a metadataset `mix.yaml` with this training split."""

    def write(folder: Path) -> None:
        _set(folder / "a", 0, shards=2, split="1,1,0")
        _set(folder / "b", 50)
        if also:
            also(folder)
        _meta(folder / "mix.yaml", version, train=train, val={"path": "a"} if version == 2 else {"datasets": [{"path": "a"}]})
        if prepared:
            prepare(folder / "mix.yaml")

    def read(folder: Path) -> list[Sample]:
        return [*map(captioned, read_set(folder / "mix.yaml")), *_shares(folder / "mix.yaml")]

    return Layout(
        name=f"blend-{name}", writer=ENERGON, what=what, write=write, read=others.pop("read", read), path="mix.yaml", **others
    )


def _shares(path: Path) -> list[Sample]:
    """Return what share each data set has, as Energon's own loader of metadatasets says; nothing where there is one only."""
    from megatron.energon import WorkerConfig
    from megatron.energon.epathlib import EPath
    from megatron.energon.metadataset import load_dataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    found = load_dataset(EPath(path)).get_datasets(training=True, split_part="train", worker_config=config)
    parts = {str(item.dataset.path).rpartition("/")[2]: item.weight or item.repetitions or 1 for item in found.datasets}
    if len(parts) < 2:
        return []
    return [["share", name, round(value / sum(parts.values()), 6)] for name, value in parts.items()]


def _inner(folder: Path) -> None:
    _set(folder / "c", 80)
    _meta(folder / "inner.yaml", train={"blend": [{"weight": 1, "path": "b"}, {"weight": 3, "path": "c"}]})


def _two_halves(folder: Path) -> None:
    """Write two data sets with the same keys: pictures, and texts."""
    pictures, texts = [{"jpg": drawing(number)} for number in range(COUNT)], [{"txt": caption(number)} for number in range(COUNT)]
    write_set(folder / "pictures", [pictures], typed("ImageSample", {"image": "jpg"}), key="{:03d}")
    write_set(folder / "texts", [texts], typed("TextSample", {"text": "txt"}), key="{:03d}")


def first_of(one: Any, two: Any) -> Any:
    """Join two samples into the first of them."""
    return one


def _joined(folder: Path) -> list[Sample]:
    return [document(image(found.image), found.text) for found in read_set(folder / "mix.yaml")]


def _keyed(folder: Path, first: int, keys: Sequence[Sequence[int]]) -> None:
    """Write pictures with captions under the numbers `keys`, shard by shard; the captions are those of later numbers."""
    shards = [[{"__key__": f"{key:03d}", "jpg": drawing(key), "txt": caption(first + key)} for key in shard] for shard in keys]
    write_set(folder, shards, CAPTIONS)


def _aligned(folder: Path) -> None:
    _keyed(folder / "first", 0, [[0, 1], [2, 3, 4]])
    _keyed(folder / "second", 20, [[4, 0], [7, 3]])
    _keyed(folder / "third", 40, [[4, 3, 2], [1, 0]])


def _two_of(*items: Mapping[str, Any]) -> Split:
    return {"join": list(items), "joiner": {"__module__": "megatron.energon", "__class__": "CaptioningSample"}}


def _all_captioned(folder: Path) -> list[Sample]:
    return [captioned(found) for found in read_set(folder / "mix.yaml")]


def _long(folder: Path) -> None:
    """Write a data set of two shards, of which one sample is excluded."""
    _set(folder / "long", 60, shards=2)
    path = folder / "long" / ".nv-meta" / "split.yaml"
    put_yaml(path, {**yaml.safe_load(path.read_text()), "exclude": ["shard_0.tar/0_001"]})


def _crude(folder: Path) -> None:
    write_set(folder / "c", [[pair(number) for number in range(80, 80 + COUNT)]])


def _of_crude(folder: Path) -> list[Sample]:
    return [crude(found) for found in read_set(folder / "mix.yaml")]


def _naming(folder: Path) -> None:
    """Write samples that name a picture, and pictures in archives and in a folder."""
    named = [{"json": {"image": f"0_{number:03d}.jpg", "caption": caption(number)}} for number in range(COUNT)]
    write_set(folder / "c", [named])
    for number in range(COUNT):
        put(folder, f"files/0_{number:03d}.jpg", picture(number + 30))
        put(folder, f"files/deep/{number}.jpg", picture(number + 40))
    put(folder, "named.jsonl", lines([{"image": f"deep/{number}.jpg", "caption": caption(number)} for number in range(COUNT)]))
    prepare(folder / "named.jsonl")


def _with_stores(folder: Path) -> list[Sample]:
    """Fetch the picture that each sample names from the one place under aux."""
    samples = []
    for found in read_set(folder / "mix.yaml"):
        (store,) = found["stores"].values()
        samples.append(document(image(store.get(found["json"]["image"])), found["json"]["caption"]))
    return samples


_JOINER = {"__module__": "megatron.energon", "__class__": "OCRSample"}


def _jsonl(folder: Path) -> None:
    put(folder, "barns.jsonl", lines([{"text": caption(number)} for number in range(COUNT)]))
    prepare(folder / "barns.jsonl")


def _of_jsonl(folder: Path) -> list[Sample]:
    return [document(found["json"]["text"]) for found in read_set(folder / "barns.jsonl")]


LAYOUTS = (
    blend("path", "one `path`", {"path": "b"}),
    blend("weights", "`blend` by weight", {"blend": [{"weight": 3, "path": "a"}, {"weight": 1, "path": "b"}]}),
    blend("v1", "the first version: `datasets` with weights",
        {"datasets": [{"weight": 3, "path": "a"}, {"weight": 1, "path": "b"}]}, version=1),
    blend("repetitions", "`blend_epochized` with 2 and 1 repetitions",
        {"blend_epochized": [{"repetitions": 2, "path": "a"}, {"repetitions": 1, "path": "b"}]}),
    blend("half", "`blend_epochized` with 0.5 and 1 repetitions",
        {"blend_epochized": [{"repetitions": 0.5, "path": "a"}, {"path": "b"}]}),
    blend("fractions", "`blend_epochized` with 0.33 and 1.7 repetitions",
        {"blend_epochized": [{"repetitions": 0.33, "path": "a"}, {"repetitions": 1.7, "path": "b"}]}),
    blend("nested", "a blend of blends", {"blend": [{"weight": 1, "path": "a"}, {"weight": 1, "path": "inner.yaml"}]},
        also=_inner),
    blend("split-part", "`split_part: val` of a data set",
        {"blend": [{"weight": 1, "path": "a", "split_part": "val"}, {"weight": 1, "path": "b"}]}),
    blend("subflavors", "`subflavors` and multipliers of shuffling",
        {"blend": [{"weight": 1, "path": "a", "subflavors": {"kind": "barn"}, "shuffle_over_epochs_multiplier": 2},
                {"weight": 1, "path": "b"}]}),
    blend("subset-ratio", "`subset: {range: [0%, 50%]}`", {"path": "b", "subset": {"range": ["0%", "50%"]}}),
    blend("subset-absolute", "`subset: {range: [1, end]}`", {"path": "b", "subset": {"range": [1, "end"]}}),
    blend("join", "`join` of pictures and texts", {"join": [{"path": "pictures"}, {"path": "texts"}], "joiner": _JOINER},
        also=_two_halves, prepared=True, read=_joined),
    blend("subset-shards", "`subset: {range: [20%, 70%]}` over two shards, with an excluded sample",
        {"path": "long", "subset": {"range": ["20%", "70%"]}}, also=_long, read=_all_captioned),
    blend("subset-of-subset", "a `subset` of percentages around numbers of samples",
        {"subset": {"range": ["0%", "50%"]}, "blend": [{"path": "long", "subset": {"range": [1, 5]}}, {"path": "b"}]},
        also=_long),
    blend("subset-nested", "a `subset` around a `subset` of percentages",
        {"subset": {"range": ["25%", "100%"]}, "blend_epochized": [{"path": "long", "subset": {"range": ["0%", "66.7%"]}}]},
        also=_long, read=_all_captioned),
    blend("subset-jsonl", "`subset` of a JSONL data set", {"path": "barns.jsonl", "subset": {"range": [1, "end"]}},
        also=_jsonl, read=lambda folder: [document(found["json"]["text"]) for found in read_set(folder / "mix.yaml")]),
    blend("join-skip", "`join` with `nonmatch: skip`, keys in another order",
        _two_of({"path": "first"}, {"path": "second", "nonmatch": "skip"}), also=_aligned, prepared=True, read=_all_captioned),
    blend("join-three", "`join` of three, in other shards",
        _two_of({"path": "first"}, {"path": "second", "nonmatch": "skip"}, {"path": "third"}), also=_aligned, prepared=True,
        read=_all_captioned),
    blend("join-subset", "a `subset` of a `join`",
        {**_two_of({"path": "first"}, {"path": "third"}), "subset": {"range": [1, 4]}}, also=_aligned, prepared=True,
        read=_all_captioned),
    blend("join-blend", "a `join` in a `blend`",
        {"blend": [{"weight": 1, **_two_of({"path": "first"}, {"path": "third"})}, {"weight": 1, "path": "b"}]},
        also=_aligned, prepared=True, read=_all_captioned),
    blend("join-names", "a `join` by names, which only a joiner of its own takes",
        {"join": {"one": {"path": "first"}, "two": {"path": "third"}},
         "joiner": {"__module__": "tests.layouts.energon_blend_layouts", "__function__": "first_of"}},
        also=_aligned, prepared=True, read=_all_captioned, refused_because="no code of a data set is run"),
    blend("aux-set", "`aux` of archives in which pictures are that `json` names",
        {"path": "c", "aux": {"pictures": "./a"}}, also=_naming, read=_with_stores),
    blend("aux-folder", "`aux: filesystem://./files`", {"path": "c", "aux": {"pictures": "filesystem://./files"}},
        also=_naming, read=_with_stores),
    blend("aux-jsonl", "a JSONL data set with `aux: filesystem://./files`",
        {"path": "named.jsonl", "aux": {"pictures": "filesystem://./files"}}, also=_naming, read=_with_stores),
    blend("aux", "`aux` of another data set", {"path": "c", "aux": {"pictures": "./a"}}, also=_crude, read=_of_crude),
    Layout(name="energon-jsonl", writer=ENERGON, what="a prepared JSONL data set", write=_jsonl, read=_of_jsonl,
        path="barns.jsonl"),
)  # fmt: skip
