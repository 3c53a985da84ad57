"""The bundled example: small, freely licensed to the last member, and read by a tokenizer that loses nothing."""

from __future__ import annotations

import csv
import itertools
import json
import re
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "data"
SHARDS = sorted(DATA.glob("*.tar"))
ADMITTED = re.compile(r"CC0-1\.0|public-domain( \(.+\))?|CC-BY-[1-4]\.\d")
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)


@pytest.fixture(scope="module")
def attribution() -> dict[tuple[str, str], list[dict[str, str]]]:
    rows = defaultdict(list)
    with (DATA / "ATTRIBUTION.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            rows[row["file"], row["member"]].append(row)
    return dict(rows)


@pytest.fixture(scope="module")
def members() -> dict[tuple[str, str], bytes]:
    found = {}
    for path in SHARDS:
        with tarfile.open(path) as tar:
            for info in tar:
                stream = tar.extractfile(info)
                assert stream is not None, f"{path.name}: {info.name} is not a file"
                assert (path.name, info.name) not in found
                found[path.name, info.name] = stream.read()
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "preprocessor/headrace/preprocessor/text/tokenizer.json"))


def annotations(members: dict[tuple[str, str], bytes]) -> dict[tuple[str, str], dict]:
    return {
        (file, name.removesuffix(".json")): json.loads(content)
        for (file, name), content in members.items()
        if name.endswith(".json")
    }


def test_members_and_attributed_members_are_the_same(members, attribution):
    assert members.keys() == attribution.keys()


def test_every_origin_is_cc0_public_domain_or_cc_by(attribution):
    licences = {row["licence"] for rows in attribution.values() for row in rows}
    assert licences
    assert [licence for licence in licences if not ADMITTED.fullmatch(licence)] == []


def test_an_annotation_names_every_package_its_media_come_from(members, attribution):
    for file, key in annotations(members):
        of_media = {
            row["origin_package"]
            for (other, name), rows in attribution.items()
            if other == file and name.startswith(f"{key}.") and not name.endswith(".json")
            for row in rows
            if row["origin_package"] != "generated"
        }
        assert of_media <= {row["origin_package"] for row in attribution[file, f"{key}.json"]}


def test_it_is_small():
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 8_000_000
    assert max(path.stat().st_size for path in SHARDS) < 2_000_000


def test_members_of_a_sample_stand_together_and_end_with_the_annotation(members):
    seen = set()
    for (file, key), group in itertools.groupby(members, key=lambda member: (member[0], member[1].partition(".")[0])):
        names = [name for _, name in group]
        assert key not in seen
        seen.add(key)
        fields = json.loads(members[file, f"{key}.json"])
        media = [*fields.get("images", []), *fields.get("audios", [])]
        assert names == [*(f"{key}.{suffix}" for suffix in media), f"{key}.json"]


def test_it_holds_every_kind_of_sample(members):
    fields = list(annotations(members).values())
    images, audios = ([len(sample.get(kind, [])) for sample in fields] for kind in ("images", "audios"))
    pairs = list(zip(images, audios, strict=True))
    assert len(fields) >= 200
    assert {(0, 0), (1, 0), (0, 1), (1, 1)} <= set(pairs)
    assert max(images) >= 4
    assert {name.rpartition(".")[2] for _, name in members} == {"jpg", "png", "webp", "flac", "mp3", "wav", "json"}


def test_control_tokens_are_one_special_token_each(tokenizer):
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == set(CONTROL_TOKENS)
    for token in CONTROL_TOKENS:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]


def test_vocabulary_size(tokenizer):
    assert tokenizer.get_vocab_size() == 4096


@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(text=st.lists(st.one_of(st.sampled_from(CONTROL_TOKENS), st.text(max_size=8))).map("".join))
def test_any_text_comes_back_with_control_tokens_in_it(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_merges_are_learned_from_the_example(tokenizer, members):
    prose = [
        json.loads(content)["texts"][0] for (_, name), content in members.items() if re.fullmatch(r"passage-\d+\.json", name)
    ]
    assert len(prose) == 12
    num_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(prose))
    assert num_tokens < sum(len(text.encode()) for text in prose) / 3
