"""Megatron-Energon data sets, made by `energon prepare` and read by Energon's loader with texts and pictures decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers import PEERS
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, FILM, answer, caption, drawing, messages, question, sharegpt
from tests.layouts.plain import Sample, conversation, dialogue, document, filled, image, other
from tests.layouts.webdataset_layouts import write_tar

ENERGON = next(peer for peer in PEERS if peer.module == "energon")

Members = Mapping[str, Any]


def prepare(folder: Path, *options: str) -> None:
    """Run `energon prepare` on a folder of archives, or on a metadataset, in this process: starting one takes seconds."""
    from megatron.energon.cli.main import main

    command = ["prepare", str(folder), "--non-interactive", "--no-progress", "--num-workers", "1", *options]
    main(command, standalone_mode=False)


def write_set(
    folder: Path,
    shards: Sequence[Sequence[Members]],
    config: Mapping[str, Any] | None = None,
    split: str = "1,0,0",
    **options: Any,
) -> None:
    """Write archives and prepare them; `config` is the content of dataset.yaml, the one of crude samples if it is None."""
    for number, samples in enumerate(shards):
        write_tar(folder / f"shard_{number}.tar", samples, options.get("key", f"{number}_{{:03d}}"))
    prepare(folder, "--split-ratio", split, "--skip-dataset-yaml")
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    put_yaml(folder / ".nv-meta" / "dataset.yaml", config or crude)


def put_yaml(path: Path, document: Mapping[str, Any]) -> None:
    """Write a YAML file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(document), sort_keys=False))


def typed(kind: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the dataset.yaml of samples of a class, by a field map."""
    return {"sample_type": {"__module__": "megatron.energon", "__class__": kind}, "field_map": dict(fields)}


def read_set(path: Path, split: str = "train", *, decoded: bool = True, **options: Any) -> Iterator[Any]:
    """Yield the samples of one split, once each, as Energon gives them; members stay bytes unless `decoded`."""
    from megatron.energon import Cooker, DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_loader, get_val_dataset, stateless

    class Encoder(DefaultTaskEncoder):
        """Passes samples on as they are."""

        decoder = SampleDecoder(image_decode="pilrgb") if decoded else None

        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return sample

        def batch(self, samples: list[Any]) -> list[Any]:
            return samples

        def encode_batch(self, batch: list[Any]) -> list[Any]:
            return batch

    @stateless
    def cook(sample: Any, **stores: Any) -> Any:
        if stores:
            sample["stores"] = stores
        return sample

    Encoder.cookers = [Cooker(cook)]
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    found = get_val_dataset(path, split_part=split, worker_config=config, batch_size=1, task_encoder=Encoder(), **options)
    for batch in get_loader(found):
        yield from batch


def energon(
    name: str,
    what: str,
    members: Callable[[int], Members],
    sample: Callable[[Any], Sample],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int = 1,
    split: str = "1,0,0",
    part: str = "train",
    then: Callable[[Path], None] | None = None,
    read_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Layout:
    """Return the layout of one prepared data set, and what a sample of the reader means."""

    def write(folder: Path) -> None:
        numbers = [range(COUNT * shard, COUNT * (shard + 1)) for shard in range(shards)]
        write_set(folder, [[members(number) for number in group] for group in numbers], config, split)
        if then:
            then(folder)

    def read(folder: Path) -> list[Sample]:
        return [sample(found) for found in read_set(folder, part, **(read_options or {}))]

    return Layout(name=f"energon-{name}", writer=ENERGON, what=what, write=write, read=read, **others)


def pair(number: int) -> Members:
    """Return a picture and its caption."""
    return {"jpg": drawing(number), "txt": caption(number)}


def captioned(found: Any) -> Sample:
    """Return a CaptioningSample."""
    return document(image(found.image), found.caption)


CAPTIONS = typed("CaptioningSample", {"image": "jpg", "caption": "txt"})


def crude(found: Any) -> Sample:
    """Return a crude sample of a picture and a caption."""
    return document(image(found["jpg"]), _text(found["txt"]))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _asked(found: Any) -> Sample:
    return dialogue([image(found.image), found.context], found.answers[0])


def _heaviest(found: Any) -> Sample:
    weights = list(found.answer_weights)
    return dialogue([image(found.image), found.context], found.answers[weights.index(max(weights))])


def _question(number: int) -> Members:
    return {
        "jpg": drawing(number),
        "json": {"question": question(number), "answers": [answer(number), "No."], "weights": [0.2, 0.8]},
    }


_LOADER = """def sample_loader(raw):
    return dict(__key__=raw["__key__"], image=raw["jpg"], caption=raw["txt"])


def part_filter(part):
    return part in ("jpg", "txt")
"""


def _with_loader(folder: Path) -> None:
    config = {"sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
              "sample_loader": "sample_loader.py:sample_loader", "part_filter": "sample_loader.py:part_filter"}  # fmt: skip
    put_yaml(folder / ".nv-meta" / "dataset.yaml", config)
    (folder / ".nv-meta" / "sample_loader.py").write_text(_LOADER)


def _without_one_shard(folder: Path) -> None:
    path = folder / ".nv-meta" / "split.yaml"
    put_yaml(path, {**yaml.safe_load(path.read_text()), "exclude": ["shard_1.tar"]})


def _without_one_sample(folder: Path) -> None:
    path = folder / ".nv-meta" / "split.yaml"
    put_yaml(path, {**yaml.safe_load(path.read_text()), "exclude": ["shard_0.tar/0_001"]})


def _second_config(folder: Path) -> None:
    put_yaml(folder / ".nv-meta" / "titles.yaml", typed("CaptioningSample", {"image": "jpg", "caption": "json[title]"}))


def _old_class(folder: Path) -> None:
    put_yaml(folder / ".nv-meta" / "dataset.yaml", {"__module__": "megatron.energon", "__class__": "CaptioningWebdataset",
                                                    "field_map": {"image": "jpg", "caption": "txt"}})  # fmt: skip


def _titled(number: int) -> Members:
    return {"jpg": drawing(number), "json": {"title": f"Title {number}", "meta": {"captions": [caption(number), "other"]}}}


def _turns(found: Any) -> list[tuple[str, str]]:
    return [(item["from"], item["value"]) for item in found["json"]["conversations"]]


LAYOUTS = (
    energon("captioning", "`CaptioningSample`: `jpg`, `txt`", pair, captioned, CAPTIONS),
    energon("nested", "`CaptioningSample`: `json[meta][captions][0]`", _titled, captioned,
        typed("CaptioningSample", {"image": "jpg", "caption": "json[meta][captions][0]"})),
    energon("alternatives", "`CaptioningSample`: `png,jpg`", pair, captioned,
        typed("CaptioningSample", {"image": "png,jpg", "caption": "json[text],txt"})),
    energon("config", "another `dataset_config`", _titled, captioned, CAPTIONS, then=_second_config,
        path="#dataset_config=titles.yaml", read_options={"dataset_config": "titles.yaml"}),
    energon("old-class", "`CaptioningWebdataset`, the class of older releases", pair, captioned, CAPTIONS, then=_old_class),
    energon("vqa", "`VQASample`: `context`, `answers`", _question, _asked,
        typed("VQASample", {"image": "jpg", "context": "json[question]", "answers": "json[answers]"})),
    energon("vqa-weights", "`VQASample` with `answer_weights`", _question, _heaviest,
        typed("VQASample", {"image": "jpg", "context": "json[question]", "answers": "json[answers]",
                "answer_weights": "json[weights]"})),
    energon("multi-choice", "`MultiChoiceVQASample`",
        lambda i: {"jpg": drawing(i), "json": {"q": question(i), "choices": ["A barn", "A boat"], "right": i % 2}},
        lambda found: dialogue([image(found.image), found.context,
                *[f"\n{letter}. {choice}" for letter, choice in zip("AB", found.choices, strict=True)]],
            "AB"[int(found.correct_choice_idx)]),
        typed("MultiChoiceVQASample", {"image": "jpg", "context": "json[q]", "choices": "json[choices]",
                "correct_choice_idx": "json[right]"})),
    energon("ocr", "`OCRSample`", pair, lambda found: document(image(found.image), found.text),
        typed("OCRSample", {"image": "jpg", "text": "txt"})),
    energon("text", "`TextSample`", lambda i: {"txt": caption(i)}, lambda found: document(found.text),
        typed("TextSample", {"text": "txt"})),
    energon("image", "`ImageSample`: pictures alone", lambda i: {"jpg": drawing(i)}, lambda found: document(image(found.image)),
        typed("ImageSample", {"image": "jpg"}), refused_because="there is nothing to learn"),
    energon("classes", "`ImageClassificationSample`", lambda i: {"jpg": drawing(i), "cls": i},
        lambda found: document(image(found.image), str(found.label)),
        typed("ImageClassificationSample", {"image": "jpg", "label": "cls"}),
        refused_because="a number is no text that a model can learn"),
    energon("vidqa", "`VidQASample`", lambda i: {"mp4": FILM, "txt": question(i)},
        lambda found: document(other("video", found.video), _text(found.context)),
        typed("VidQASample", {"video": "mp4", "context": "txt"}), read_options={"decoded": False},
        refused_because="films are not taken"),
    energon("interleaved", "`InterleavedSample`: a sequence of texts", lambda i: {"json": {"sequence": ["See", caption(i)]}},
        lambda found: document(*found.sequence), typed("InterleavedSample", {"sequence": "json[sequence]"})),
    energon("similarity", "`SimilarityInterleavedSample`",
        lambda i: {"jpg": drawing(i), "json": {"texts": ["See", caption(i)], "matched": [1]}},
        lambda found: document(f"{found.texts[0]} ", image(found.images), found.texts[1]),
        typed("SimilarityInterleavedSample", {"images": "jpg", "texts": "json[texts]", "matched_text_indices": "json[matched]"})),
    energon("similarity-matrix", "`SimilarityInterleavedSample` without `matched_text_indices`",
        lambda i: {"jpg": drawing(i), "json": {"texts": ["See", caption(i)], "matrix": [[0.1, 0.3]]}},
        lambda found: document(*found.texts, other("place", b"")),
        typed("SimilarityInterleavedSample", {"images": "jpg", "texts": "json[texts]", "similarity_matrix": "json[matrix]"}),
        refused_because="nothing says where its pictures are"),
    energon("loader", "a `sample_loader.py`", pair, captioned, CAPTIONS, then=_with_loader,
        refused_because="no code of a data set is run"),
    energon("crude", "`CrudeWebdataset`: `jpg`, `txt`", pair, crude),
    energon("crude-parts", "`CrudeWebdataset` with a `part_filter` of `jpg`, `txt`",
        lambda i: {**pair(i), "seg.png": drawing(i + 50), "json": {"caption": "Other"}},
        lambda found: document(image(found["jpg"]), _text(found["txt"]), *map(str, {"json", "seg.png"} & found.keys())),
        {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "part_filter": ["jpg", "txt"]}),
    energon("crude-llava", "`CrudeWebdataset`: `jpg`, `json` with `conversations`",
        lambda i: {"jpg": drawing(i), "json": {"conversations": sharegpt(i)}},
        lambda found: conversation(_turns(found), image(found["jpg"]))),
    energon("crude-turns", "`CrudeWebdataset`: `json` that is the list of turns, as Megatron-LM converts LLaVA",
        lambda i: {"jpg": drawing(i), "json": sharegpt(i)},
        lambda found: conversation([(item["from"], item["value"]) for item in found["json"]], image(found["jpg"]))),
    energon("crude-messages", "`CrudeWebdataset`: `0.jpg`, `1.jpg`, `json` with `messages`",
        lambda i: {"0.jpg": drawing(i), "1.jpg": drawing(i + 50), "json": {"messages": messages(i, "<image><image>")}},
        lambda found: dialogue(filled(found["json"]["messages"][0]["content"], image(found["0.jpg"]), image(found["1.jpg"])),
            found["json"]["messages"][1]["content"])),
    energon("crude-video", "`CrudeWebdataset`: `mp4`, `txt`", lambda i: {"mp4": FILM, "txt": caption(i)},
        lambda found: document(other("video", found["mp4"]), _text(found["txt"])), read_options={"decoded": False},
        refused_because="films are not taken"),
    energon("splits", "train, val and test by ratio", pair, captioned, CAPTIONS, shards=4, split="2,1,1"),
    energon("val", "one of these by `#val`", pair, captioned, CAPTIONS, shards=4, split="2,1,1", part="val", path="#val"),
    energon("excluded-shard", "a shard that split.yaml excludes", pair, captioned, CAPTIONS, shards=2, then=_without_one_shard),
    energon("excluded-sample", "a sample that split.yaml excludes", pair, captioned, CAPTIONS, then=_without_one_sample),
)  # fmt: skip
