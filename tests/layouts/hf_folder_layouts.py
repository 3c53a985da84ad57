"""Folders that Hugging Face `datasets` reads as they are: ImageFolder, AudioFolder, `save_to_disk`, cloned Hub repositories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.layouts.hf_parquet_layouts import DATASETS, dataset, picture_of, sound_of, undecoded
from tests.layouts.layout import Layout
from tests.layouts.material import COUNT, FILM, answer, caption, drawing, picture, question, sharegpt, sound
from tests.layouts.plain import Sample, conversation, dialogue, document, other

Rows = list[dict[str, Any]]


def put(folder: Path, name: str, data: bytes | str) -> None:
    """Write one file, and the folders that it is in."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def lines(rows: Rows) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(rows: Rows, separator: str = ",") -> str:
    """Return rows as CSV with a header."""
    import csv
    import io

    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), delimiter=separator, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def folder_layout(
    name: str,
    what: str,
    write: Callable[[Path], None],
    sample: Callable[[dict[str, Any]], Sample],
    loader: str = "",
    **others: Any,
) -> Layout:
    """Return the layout of a folder whose training split `load_dataset` reads; `loader` names the builder, "" lets it choose."""
    split = others.pop("split", "train")
    config = others.pop("config", None)

    def read(folder: Path) -> list[Sample]:
        import datasets

        options = {"split": split, "cache_dir": str(folder / ".cache")}
        where = {"data_dir": str(folder)} if loader else {"name": config}
        found = datasets.load_dataset(loader or str(folder), **where, **options)
        return [sample(item) for item in undecoded(found)]

    return Layout(name=f"hf-{name}", writer=DATASETS, what=what, write=write, read=read, **others)


def _images(folder: Path, prefix: str = "") -> None:
    for number in range(COUNT):
        put(folder, f"{prefix}{number:04d}.jpg", picture(number))


def _metadata(text: Callable[[Rows], str], name: str, prefix: str = "", key: str = "text") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        _images(folder, prefix)
        put(folder, f"{prefix}{name}", text([{"file_name": f"{i:04d}.jpg", key: caption(i)} for i in range(COUNT)]))

    return write


def _metadata_parquet(folder: Path) -> None:
    _images(folder)
    dataset([{"file_name": f"{i:04d}.jpg", "text": caption(i)} for i in range(COUNT)]).to_parquet(
        str(folder / "metadata.parquet")
    )


def _several_images(folder: Path) -> None:
    _images(folder)
    rows = [{"images_file_names": [f"{i:04d}.jpg", f"{(i + 1) % COUNT:04d}.jpg"], "text": caption(i)} for i in range(COUNT)]
    put(folder, "metadata.jsonl", lines(rows))


def _classes(folder: Path) -> None:
    for number in range(4):
        put(folder, f"train/{'cat' if number % 2 else 'dog'}/{number}.jpg", picture(number))


def _split_folders(folder: Path) -> None:
    for split, start in (("train", 0), ("test", 20)):
        for number in range(start, start + COUNT):
            put(folder, f"{split}/{number:04d}.jpg", picture(number))
        put(
            folder,
            f"{split}/metadata.jsonl",
            lines([{"file_name": f"{i:04d}.jpg", "text": caption(i)} for i in range(start, start + COUNT)]),
        )


def _sounds(form: str = "WAV", key: str = "transcription", name: str = "metadata.jsonl") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for number in range(COUNT):
            put(folder, f"data/{number}.{form.lower()}", sound(number, form))
        rows: Rows = [{"file_name": f"data/{i}.{form.lower()}", key: caption(i)} for i in range(COUNT)]
        put(folder, name, table(rows) if name.endswith(".csv") else lines(rows))

    return write


def _films(folder: Path) -> None:
    for number in range(COUNT):
        put(folder, f"{number}.mp4", FILM + bytes([number]))
    put(folder, "metadata.jsonl", lines([{"file_name": f"{i}.mp4", "text": caption(i)} for i in range(COUNT)]))


def _rows(start: int = 0) -> Rows:
    return [{"image": drawing(i), "text": caption(i)} for i in range(start, start + COUNT)]


def _features(d: Any) -> dict[str, Any]:
    return {"image": d.Image(), "text": d.Value("string")}


def _saved(folder: Path) -> None:
    dataset(_rows(), _features).save_to_disk(str(folder))


def _saved_shards(folder: Path) -> None:
    dataset(_rows(), _features).save_to_disk(str(folder), num_shards=3)


def _saved_dict(folder: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": dataset(_rows(), _features), "test": dataset(_rows(20), _features)}).save_to_disk(str(folder))


def _saved_chats(folder: Path) -> None:
    dataset([{"image": drawing(i), "conversations": sharegpt(i)} for i in range(COUNT)]).save_to_disk(str(folder))


def _load_saved(sample: Callable[[dict[str, Any]], Sample], split: str = "") -> Callable[[Path], list[Sample]]:
    def read(folder: Path) -> list[Sample]:
        import datasets

        found = datasets.load_from_disk(str(folder))
        return [sample(item) for item in undecoded(found[split] if split else found)]

    return read


def _repository(*splits: str, readme: str = "", subfolder: str = "data/", shards: int = 1) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for number, split in enumerate(splits):
            found = dataset(_rows(20 * number), _features)
            for shard in range(shards):
                name = f"{subfolder}{split}-{shard:05d}-of-{shards:05d}.parquet"
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                found.shard(shards, shard).to_parquet(str(folder / name))
        put(folder, "README.md", f"---\n{readme or 'license: cc0-1.0'}\n---\n# Barns\n")
        put(folder, ".gitattributes", "*.parquet filter=lfs diff=lfs merge=lfs -text\n")

    return write


_DEFAULT_CONFIG = """configs:
- config_name: default
  data_files:
  - split: train
    path: default/train-*
  - split: test
    path: default/test-*"""


_TWO_CONFIGS = """configs:
- config_name: easy
  default: true
  data_files:
  - split: train
    path: easy/train-*
  - split: test
    path: easy/test-*
- config_name: hard
  data_files:
  - split: train
    path: hard/train-*"""


def _configs(folder: Path) -> None:
    _repository("train", "test", subfolder="easy/", readme=_TWO_CONFIGS)(folder)
    dataset(_rows(40), _features).to_parquet(str(_made(folder / "hard") / "train-00000-of-00001.parquet"))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _json_repository(folder: Path) -> None:
    for split, start in (("train", 0), ("test", 20)):
        rows: Rows = [{"question": question(i), "answer": answer(i)} for i in range(start, start + COUNT)]
        put(folder, f"{split}.jsonl", lines(rows))
    put(folder, "README.md", "---\nlicense: cc0-1.0\n---\n")


def _tar_repository(folder: Path) -> None:
    import io
    import tarfile

    for split, start in (("train", 0), ("validation", 20)):
        with tarfile.open(_made(folder / "data") / f"{split}-00000.tar", "w") as archive:
            for number in range(start, start + COUNT):
                for extension, data in (("jpg", picture(number)), ("txt", caption(number).encode())):
                    info = tarfile.TarInfo(f"{number:04d}.{extension}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))


def _image_text(row: dict[str, Any]) -> Sample:
    return document(picture_of(row["image"]), row["text"])


def _spoken(row: dict[str, Any]) -> Sample:
    return document(sound_of(row["audio"]), row.get("transcription") or row.get("text"))


def _classified(row: dict[str, Any]) -> Sample:
    return document(picture_of(row["image"]), str(row["label"]))


def _chat(row: dict[str, Any]) -> Sample:
    return conversation([(turn["from"], turn["value"]) for turn in row["conversations"]], picture_of(row["image"]))


LAYOUTS = (
    folder_layout("imagefolder-jsonl", "ImageFolder: pictures, `metadata.jsonl` with `file_name`, `text`",
        _metadata(lines, "metadata.jsonl"), _image_text, "imagefolder", mapping={"images": "file_name"}),
    folder_layout("imagefolder-csv", "ImageFolder: `metadata.csv`", _metadata(table, "metadata.csv"), _image_text, "imagefolder"),
    folder_layout("imagefolder-parquet", "ImageFolder: `metadata.parquet`", _metadata_parquet, _image_text, "imagefolder"),
    folder_layout("imagefolder-train", "ImageFolder in `train/`", _metadata(lines, "metadata.jsonl", "train/"), _image_text,
        "imagefolder"),
    folder_layout("imagefolder-splits", "ImageFolder in `train/` and `test/`", _split_folders, _image_text, "imagefolder"),
    folder_layout("imagefolder-several", "ImageFolder: `images_file_names`, two pictures a row", _several_images,
        lambda row: document(*map(picture_of, row["images"]), row["text"]), "imagefolder"),
    folder_layout("imagefolder-classes", "ImageFolder: a folder a class", _classes, _classified, "imagefolder",
        refused_because="a class is no text that a model can learn"),
    folder_layout("audiofolder", "AudioFolder: `metadata.jsonl` with `transcription`", _sounds(), _spoken, "audiofolder",
        mapping={"audios": "file_name", "text": "transcription"}),
    folder_layout("audiofolder-text", "AudioFolder: `metadata.jsonl` with `text`", _sounds("FLAC", "text"), _spoken,
        "audiofolder", mapping={"audios": "file_name"}),
    folder_layout("audiofolder-csv", "AudioFolder: `metadata.csv`", _sounds("MP3", name="metadata.csv"), _spoken, "audiofolder"),
    folder_layout("videofolder", "VideoFolder: films, `metadata.jsonl`", _films,
        lambda row: document(other("video", row["video"]), row["text"]), "videofolder", refused_because="films are not taken"),
    Layout(name="hf-saved", writer=DATASETS, what="`save_to_disk`: Arrow files", write=_saved, read=_load_saved(_image_text)),
    Layout(name="hf-saved-shards", writer=DATASETS, what="`save_to_disk` of several shards", write=_saved_shards,
        read=_load_saved(_image_text)),
    Layout(name="hf-saved-dict", writer=DATASETS, what="`save_to_disk` of a `DatasetDict` with `train`, `test`",
        write=_saved_dict, read=_load_saved(_image_text, "train")),
    Layout(name="hf-saved-chats", writer=DATASETS, what="`save_to_disk` of conversations with pictures", write=_saved_chats,
        read=_load_saved(_chat)),
    folder_layout("repo-train", "cloned repository: `data/train-*.parquet`", _repository("train"), _image_text),
    folder_layout("repo-shards", "cloned repository: three shards of `train`", _repository("train", shards=3), _image_text),
    folder_layout("repo-splits", "cloned repository: `train`, `validation`, `test` in `data/`",
        _repository("train", "validation", "test"), _image_text),
    folder_layout("repo-splits-top", "cloned repository: the same beside the README", _repository("train", "test", subfolder=""),
        _image_text),
    folder_layout("repo-glob", "its training split by name", _repository("train", "test"), _image_text, path="data/train-*"),
    folder_layout("repo-default", "repository as `push_to_hub` makes it: `default/train-*`",
        _repository("train", "test", subfolder="default/", readme=_DEFAULT_CONFIG), _image_text),
    folder_layout("repo-configs", "repository with two `configs:`, one the default", _configs, _image_text),
    folder_layout("repo-config", "one of these by its folder", _configs, _image_text, config="hard", path="hard"),
    folder_layout("repo-jsonl", "repository of `train.jsonl`, `test.jsonl`", _json_repository,
        lambda row: dialogue([row["question"]], row["answer"])),
    folder_layout("repo-tars", "repository of archives: `data/train-*.tar`, `validation-*.tar`", _tar_repository,
        lambda row: document(picture_of(row["jpg"]), row["txt"])),
)  # fmt: skip
