"""JSON lines and tables whose columns are parts of a sample: questions and answers, prompts, tools, thoughts, packed files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.layouts.hf_folder_layouts import lines, table
from tests.layouts.jsonl_layouts import Media, Row, jsonl, load_json, plain_lines, said
from tests.layouts.layout import Layout
from tests.layouts.material import answer, caption, messages, question, sharegpt
from tests.layouts.plain import Sample, conversation, dialogue, document, turn

_CALL = {"type": "function", "id": "1", "function": {"name": "look", "arguments": '{"where": "barn"}'}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


def load_table(path: Path) -> list[Row]:
    """Return the rows that `datasets` reads of a CSV or TSV file."""
    import datasets

    options = {"sep": "\t"} if ".tsv" in path.name else {}
    return [
        dict(row)
        for row in datasets.load_dataset(
            "csv", data_files=str(path), split="train", cache_dir=str(path.parent / ".cache"), **options
        )
    ]


def _gzip(rows: list[Row]) -> bytes:
    import gzip

    return gzip.compress(lines(rows).encode(), mtime=0)


def _zstd(rows: list[Row]) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(lines(rows).encode())
    return bytes(sink.getvalue())


def _tsv(rows: list[Row]) -> str:
    return table(rows, "\t")


def _quoted(rows: list[Row]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    writer.writerows([list(rows[0]), *[list(row.values()) for row in rows]])
    return stream.getvalue()


def _captioned(found: Row, load: Media) -> Sample:
    return document(load(found["image"]), found["caption"])


def _asked(found: Row, load: Media) -> Sample:
    return dialogue([found["question"]], found["answer"])


def _tooled(number: int) -> Row:
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": "1", "content": "a barn"}
    return {"messages": [messages(number, "")[0], call, result, messages(number, "")[1]], "tools": [_TOOL]}


def _unreadable(found: Row, load: Media) -> Sample:
    """Return the messages as they are: an answer that calls a tool, or thinks, is another one than its content alone."""
    return [[item["role"], [item]] for item in found["messages"]]


def _thinking(key: str) -> object:
    return lambda i: {"messages": [messages(i, "")[0], {"role": "assistant", "content": answer(i), key: "Hm. A barn?"}]}


LAYOUTS: tuple[Layout, ...] = (
    jsonl("qa", "GSM8K: `question`, `answer`", lambda i: {"question": question(i), "answer": answer(i)}, _asked, media=""),
    jsonl("vqa", "VQA: `image`, `question`, `answer`",
        lambda i: {"image": f"images/{i}.jpg", "question": question(i), "answer": answer(i)},
        lambda found, load: dialogue([load(found["image"]), found["question"]], found["answer"])),
    jsonl("qa-system", "`question`, `answer`, `system`",
        lambda i: {"system": "Be brief.", "question": question(i), "answer": answer(i)},
        lambda found, load: [turn("system", found["system"]), *_asked(found, load)], media=""),
    jsonl("prompt-completion", "TRL: `prompt`, `completion` as texts", lambda i: {"prompt": question(i), "completion": answer(i)},
        lambda found, load: dialogue([found["prompt"]], found["completion"]), media=""),
    jsonl("prompt-response", "`prompt`, `response`", lambda i: {"prompt": question(i), "response": answer(i)},
        lambda found, load: dialogue([found["prompt"]], found["response"]), media=""),
    jsonl("prompt-messages", "TRL: `prompt`, `completion` as messages",
        lambda i: {"prompt": messages(i, "")[:1], "completion": messages(i, "")[1:]},
        lambda found, load: conversation(said([*found["prompt"], *found["completion"]])), media=""),
    jsonl("instruction-output", "Alpaca without inputs: `instruction`, `output`",
        lambda i: {"instruction": question(i), "output": answer(i)},
        lambda found, load: dialogue([found["instruction"]], found["output"]), media=""),
    jsonl("alpaca", "Alpaca: `instruction`, an empty `input`, `output`",
        lambda i: {"instruction": question(i), "input": "", "output": answer(i)},
        lambda found, load: dialogue([found["instruction"]], found["output"]), media=""),
    jsonl("alpaca-input", "Alpaca: `instruction`, `input`, `output`",
        lambda i: {"instruction": question(i), "input": caption(i), "output": answer(i)},
        lambda found, load: dialogue([f"{found['instruction']}\n{found['input']}"], found["output"]), media=""),
    jsonl("dolly", "Dolly: `instruction`, `context`, `response`",
        lambda i: {"instruction": question(i), "context": caption(i), "response": answer(i)},
        lambda found, load: dialogue([f"{found['instruction']}\n{found['context']}"], found["response"]), media=""),
    jsonl("dpo", "`prompt`, `chosen`, `rejected`", lambda i: {"prompt": question(i), "chosen": answer(i), "rejected": "No."},
        lambda found, load: dialogue([found["prompt"]], found["chosen"]), media="",
        refused_because="preferences are no text to learn"),
    jsonl("dpo-messages", "`messages` and `rejected_response`, as ms-swift has them",
        lambda i: {"messages": messages(i, ""), "rejected_response": "No."},
        lambda found, load: conversation(said(found["messages"])), media=""),
    jsonl("captions", "a list under `caption`", lambda i: {"image": f"images/{i}.jpg", "caption": [caption(i), "a drawing"]},
        lambda found, load: document(load(found["image"]), found["caption"][0]), mapping={"text": "caption.0"}),
    jsonl("file-name", "`file_name`, `caption`", lambda i: {"file_name": f"images/{i}.jpg", "caption": caption(i)},
        lambda found, load: document(load(found["file_name"]), found["caption"]), mapping={"images": "file_name"}),
    jsonl("nested", "the caption under `meta`", lambda i: {"image": f"images/{i}.jpg", "meta": {"caption": caption(i)}},
        lambda found, load: document(load(found["image"]), found["meta"]["caption"]), mapping={"text": "meta.caption"}),
    jsonl("image-path", "`image_path`, `caption`", lambda i: {"image_path": f"images/{i}.jpg", "caption": caption(i)},
        lambda found, load: document(load(found["image_path"]), found["caption"]), mapping={"images": "image_path"}),
    jsonl("path-struct", "`image` as a struct `{path}`", lambda i: {"image": {"path": f"images/{i}.jpg"}, "caption": caption(i)},
        lambda found, load: document(load(found["image"]["path"]), found["caption"])),
    jsonl("mmc4", "MMC4: `text_list`, `image_info` with `matched_text_index`, as OpenFlamingo joins them",
        lambda i: {"text_list": [caption(i), "The end."],
            "image_info": [{"image_name": f"images/{i}.jpg", "matched_text_index": 1}]},
        lambda found, load: document(f"{found['text_list'][0]} ", load(found["image_info"][0]["image_name"]),
            found["text_list"][1])),
    # `datasets` 5.0.1 moves a null behind the text that follows it.
    jsonl("obelics", "OBELICS: `images`, `texts` with nulls in turn",
        lambda i: {"images": [f"images/{i}.jpg", None], "texts": [None, caption(i)]},
        lambda found, load: document(load(found["images"][0]), found["texts"][1]), read_rows=plain_lines),
    jsonl("tools", "OpenAI: `tool_calls`, role `tool`, `tools`", _tooled, _unreadable, media=""),
    jsonl("tool-role", "role `tool` alone",
        lambda i: {"messages": [messages(i, "")[0], {"role": "tool", "content": "a barn"}, messages(i, "")[1]]}, _unreadable,
        media=""),
    jsonl("hermes", "Hermes: `<tool_call>` in the text, turns of `tool`",
        lambda i: {"conversations": [sharegpt(i, "")[0], {"from": "gpt", "value": "<tool_call>\n{}\n</tool_call>"},
                {"from": "tool", "value": "<tool_response>\n{}\n</tool_response>"}, sharegpt(i, "")[1]]},
        lambda found, load: conversation(said(found["conversations"])), media=""),
    jsonl("reasoning", "DeepSeek: `reasoning_content`", _thinking("reasoning_content"), _unreadable, media=""),
    jsonl("thinking", "gpt-oss: `thinking`", _thinking("thinking"), _unreadable, media=""),
    jsonl("think-tags", "`<think>` in the text",
        lambda i: {"messages": [messages(i, "")[0], {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{answer(i)}"}]},
        lambda found, load: conversation(said(found["messages"])), media=""),
    jsonl("null-content", "an answer whose content is null",
        lambda i: {"messages": [messages(i, "")[0], {"role": "assistant", "content": None, "tool_calls": [_CALL]}]}, _unreadable,
        media=""),
    jsonl("weights", "`train: false` at an answer",
        lambda i: {"messages": [*messages(i, ""), {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "5", "train": False}]},
        lambda found, load: [turn(item["role"], item["content"],
                learnt=item.get("train") is not False) for item in found["messages"]], media=""),
    jsonl("cohere-roles", "roles of one's own: `USER`, `CHATBOT`",
        lambda i: {"messages": [{"role": "USER", "content": question(i)}, {"role": "CHATBOT", "content": answer(i)}]},
        lambda found, load: dialogue([found["messages"][0]["content"]], found["messages"][1]["content"]), media="",
        mapping={"user_roles": ["USER"], "assistant_roles": ["CHATBOT"]}),
    jsonl("own-placeholder", "`<img>` in place of `<image>`",
        lambda i: {"messages": messages(i, "<img>"), "images": [f"images/{i}.jpg"]},
        lambda found, load: dialogue([load(found["images"][0]), found["messages"][0]["content"].removeprefix("<img>")],
            found["messages"][1]["content"]), mapping={"image_placeholder": "<img>"}),
    jsonl("internvl", "InternVL: `<ImageHere>` in the turns",
        lambda i: {"image": f"images/{i}.jpg", "conversations": sharegpt(i, "<ImageHere>")},
        lambda found, load: [turn("user", load(found["image"]), question(int(Path(found["image"]).stem))),
            *conversation(said(found["conversations"])[1:])], mapping={"image_placeholder": "<ImageHere>"}),
    jsonl("gz", "`.jsonl.gz`", lambda i: {"image": f"images/{i}.jpg", "caption": caption(i)}, _captioned, file="train.jsonl.gz",
        text=_gzip),
    jsonl("zst", "`.jsonl.zst`", lambda i: {"image": f"images/{i}.jpg", "caption": caption(i)}, _captioned,
        file="train.jsonl.zst", text=_zstd),
    jsonl("json-lines", "JSON lines called `.json`", lambda i: {"image": f"images/{i}.jpg", "caption": caption(i)}, _captioned,
        file="train.json"),
    jsonl("ndjson", "JSON lines called `.ndjson`", lambda i: {"text": caption(i)}, lambda found, load: document(found["text"]),
        media="", file="train.ndjson", read_rows=load_json),
    jsonl("csv", "CSV: `image`, `caption`", lambda i: {"image": f"images/{i}.jpg", "caption": f"{caption(i)}, \"quoted\""},
        _captioned, file="train.csv", text=table, read_rows=load_table),
    jsonl("csv-quoted", "CSV, everything quoted, CRLF",
        lambda i: {"image": f"images/{i}.jpg", "caption": f"{caption(i)}\nin two lines"}, _captioned, file="train.csv",
        text=_quoted, read_rows=load_table),
    jsonl("csv-text", "CSV: `text` alone", lambda i: {"text": caption(i)}, lambda found, load: document(found["text"]), media="",
        file="train.csv", text=table, read_rows=load_table),
    jsonl("csv-qa", "CSV: `question`, `answer`", lambda i: {"question": question(i), "answer": answer(i)}, _asked, media="",
        file="train.csv", text=table, read_rows=load_table),
    jsonl("tsv", "TSV: `image`, `caption`", lambda i: {"image": f"images/{i}.jpg", "caption": caption(i)}, _captioned,
        file="train.tsv", text=_tsv, read_rows=load_table),
    jsonl("tsv-audio", "TSV: `path`, `sentence`, as Common Voice", lambda i: {"path": f"clips/{i}.wav", "sentence": caption(i)},
        lambda found, load: document(load(found["path"]), found["sentence"]), media="", sounds="clips/{}.wav", file="train.tsv",
        text=_tsv, read_rows=load_table, mapping={"text": "sentence", "audios": "path"}),
)  # fmt: skip
