"""The fast codec gives the reference's ids and spans, or leaves the text, or the whole tokenizer, to it."""

from __future__ import annotations

import json
import tarfile
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from headrace.preprocessor.text import BUNDLED, byte_pairs
from headrace.preprocessor.text.byte_pairs import LONGEST, PATTERNS, SETTLED, BytePairs
from tests.examples import with_examples

ROOT = Path(__file__).parents[4]
EXAMPLE, HOSTILE = ROOT / "examples" / "data", ROOT / "tests" / "data" / "hostile" / "text"
BYTES = {name: place for place, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
"""The names of bytes in a tokenizer's file; those of bytes that only continue a character stand last."""
POINTS = [chr(point) for first, last in SETTLED for point in range(first, last + 1)]
PROSE = (
    "It's the cat that sat on the mat, and 12 rats they'd seen in 2024...  «Größe» über Straße\n\n"
    "Кошка сидела на коврике. Η γάτα κάθισε. 猫はマットの上に座った。고양이가 앉았다! 猫坐在垫子上 🐈🎉\r\n"
    "\tdef f(x):\n        return x ** 2\n"
)

pytestmark = pytest.mark.skipif(byte_pairs.NAME is None, reason="tiktoken is not installed")


def splitter(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, cut]}


def document(merges: list[tuple[str, str]], pattern: str = "gpt-2", **model: Any) -> dict[str, Any]:
    """A tokenizer of all bytes and what the merges make, with ids in the order of the merges."""
    vocab = {token: place for place, token in enumerate(dict.fromkeys([*BYTES, *(left + right for left, right in merges)]))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    result: dict[str, Any] = json.loads(tokenizer.to_str())
    result["pre_tokenizer"] = splitter(PATTERNS[pattern])
    result["model"] |= model
    return result


@cache
def trained(pattern: str, *, composed: bool = False) -> tuple[BytePairs, Tokenizer]:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated")
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, cut])
    tokenizer.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=400, initial_alphabet=list(BYTES), show_progress=False))
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    return loaded(json.loads(tokenizer.to_str())), tokenizer


@cache
def bundled() -> tuple[BytePairs, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    tokenizer.encode_special_tokens = True
    return loaded(json.loads(BUNDLED.read_text())), tokenizer


def loaded(content: dict[str, Any]) -> BytePairs:
    codec = byte_pairs.load(content)
    assert codec is not None
    return codec


def check(codecs: tuple[BytePairs, Tokenizer], text: str, spans: list[tuple[int, int]]) -> None:
    """Equal ids, and the tokens of each span are those that share a character with it."""
    fast, reference = codecs
    encoding = reference.encode(text, add_special_tokens=False)
    result = fast.encode_spans(text, spans)
    assert result is not None
    assert result[0] == encoding.ids
    for (start, stop), tokens in zip(spans, result[1], strict=True):
        shared = [place for place, (first, end) in enumerate(encoding.offsets) if first < stop and start < end]
        assert list(tokens) == (shared if start < stop else [])


texts = st.text(st.one_of(st.sampled_from("aZſ '\n\r\t\u00a013.s!"), st.sampled_from(POINTS)), max_size=60)
edges = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)).map(lambda span: (min(span), max(span))), max_size=4)


@given(texts, edges, st.sampled_from(sorted(PATTERNS)))
@with_examples(500)
@example("", [(0, 0), (0, 3), (2, 5)], "qwen")
@example("a🦜b", [(0, 1), (1, 2), (2, 3), (3, 9), (7, 9)], "qwen")
def test_any_text_has_the_references_ids_and_spans(text: str, spans: list[tuple[int, int]], pattern: str) -> None:
    check(trained(pattern), text, spans)
    check(bundled(), text, spans)


@given(st.text(st.sampled_from("'sStTdDmMlLvVrReE aIſ\u212a\n"), max_size=40), st.sampled_from(sorted(PATTERNS)))
@with_examples(300)
def test_short_forms(text: str, pattern: str) -> None:
    check(trained(pattern), text, [(0, len(text))])


BESIDE = "a1 \n'"
"""A letter, a digit, two blanks, and what short forms begin with."""


@cache
def seams(pattern: str) -> tuple[BytePairs, Tokenizer]:
    """A tokenizer that joins BESIDE with any byte next to it, so that ids show where pieces end."""
    merges = dict.fromkeys(pair for mark in "a1ĠĊ'" for byte in BYTES for pair in ((mark, byte), (byte, mark)))
    content = document(list(merges), pattern)
    return loaded(content), Tokenizer.from_str(json.dumps(content))


SIMILAR = ("llama-3",)
"""Patterns that differ from others in how they cut digits alone: dear tests leave them to `make test-slow`."""
EACH = pytest.mark.parametrize("pattern", [pytest.param(x, marks=[pytest.mark.slow] * (x in SIMILAR)) for x in sorted(PATTERNS)])


@EACH
def test_every_settled_character_is_cut_alike_beside_every_class(pattern: str) -> None:
    codecs = seams(pattern)
    for start in range(0, len(POINTS), LONGEST // 12):
        text = "".join(f"'{x}a{x}1{x} {x}\n{x}" for x in POINTS[start : start + LONGEST // 12])
        check(codecs, text, [])
    for point in range(0x80):  # one byte, which can join one side only
        for mark in BESIDE:
            check(codecs, chr(point) + mark, [(0, 1)])
            check(codecs, mark + chr(point), [(1, 2)])


def test_seams_show() -> None:
    by_class, by_digit = seams("gpt-2")[0], seams("qwen")[0]
    assert by_class.encode_spans("x1", []) == by_digit.encode_spans("x1", [])
    assert by_class.encode_spans("11", []) != by_digit.encode_spans("11", [])


def test_every_settled_character_alone_and_composed() -> None:
    fast, reference = bundled()
    for x, encoding in zip(POINTS, reference.encode_batch_fast(POINTS, add_special_tokens=False), strict=True):
        assert fast.encode_spans(x, []) == (encoding.ids, [])
    compose = normalizers.NFC().normalize_str
    assert [x for x in POINTS if unicodedata.is_normalized("NFC", x) != (compose(x) == x)] == []


def example_texts() -> Iterator[str]:
    for path in sorted(EXAMPLE.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None and member.name.endswith((".json", ".txt")):
                    yield file.read().decode()


def test_texts_of_the_example_and_of_the_hostile_set() -> None:
    hostile = (path.read_bytes().decode(errors="replace") for path in HOSTILE.iterdir())
    taken = 0
    for text in chain(example_texts(), hostile, [PROSE]):
        result = bundled()[0].encode_spans(text, [])
        if result is not None:
            taken += 1
            check(bundled(), text, [(start, start + 7) for start in range(0, min(len(text), 300), 11)])
    assert taken > 200


@EACH
@pytest.mark.parametrize("run", [" ", "\n", "a", "A", "^", "1", "'s", "\u00a0", "中", " a", "\n "])
def test_the_longest_run_is_encoded(run: str, pattern: str) -> None:
    for end in ("", "x"):
        check(trained(pattern), (run * LONGEST)[: LONGEST - 1] + end, [])


@pytest.mark.parametrize(
    "text", ["a" * (LONGEST + 1), "\u0378", "e\u0301", "ภาษา", "क", "\ue000", "\U0001fae8", "fine, but for one \U00020000"]
)
def test_other_texts_are_left_to_the_reference(text: str) -> None:
    assert bundled()[0].encode_spans(text, [(0, 1)]) is None


@given(st.text(st.sampled_from("がか\u3099é ÅΩ한a"), max_size=12), edges)
@settings(derandomize=True)
def test_text_that_would_be_composed_is_left_to_the_reference(text: str, spans: list[tuple[int, int]]) -> None:
    codecs = trained("qwen", composed=True)
    if unicodedata.is_normalized("NFC", text):
        check(codecs, text, spans)
    else:
        assert codecs[0].encode_spans(text, spans) is None


def test_threads_share_a_codec() -> None:
    fast, _ = bundled()
    texts = [PROSE[start:] for start in range(60)] * 5
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: fast.encode_spans(text, [(0, 9)]), texts)) == [
            fast.encode_spans(text, [(0, 9)]) for text in texts
        ]


MERGES = [("a", "b"), ("c", "d"), ("ab", "cd")]


def test_a_plain_tokenizer_is_taken_in_every_notation() -> None:
    plain = document(MERGES)
    older = document(MERGES) | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}
    older["model"]["merges"] = [" ".join(pair) for pair in MERGES]
    for content in (plain, older):
        assert loaded(content).encode_spans("abcd abc", [(2, 3)]) == ([258, BYTES["Ġ"], 256, BYTES["c"]], [range(1)])


def test_a_token_may_have_several_merges_in_a_row() -> None:
    content = document([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")])
    check((loaded(content), Tokenizer.from_str(json.dumps(content))), "abc abcabc bcabc", [])


def test_a_token_that_its_own_bytes_do_not_make_is_refused() -> None:
    content = document([("b", "c"), ("a", "b"), ("ab", "c")])
    assert len(Tokenizer.from_str(json.dumps(content)).encode("abc").ids) == 2, "a and bc, which tiktoken would join"
    assert byte_pairs.load(content) is None


def test_that_holds_for_tokens_that_are_no_text() -> None:
    first, second, third = list(BYTES)[-3:]
    assert byte_pairs.load(document([(second, third), (first, second), (first + second, third)])) is None
    assert byte_pairs.load(document([(first, second), (first + second, third)])) is not None


def test_ids_that_fall_along_the_merges_are_refused() -> None:
    content = document(MERGES)
    content["model"]["merges"] = [MERGES[1], MERGES[0], MERGES[2]]
    assert byte_pairs.load(content) is None


def test_two_tokens_with_one_id_or_a_missing_byte_are_refused() -> None:
    content = document(MERGES)
    content["model"]["vocab"]["ab"] = content["model"]["vocab"]["cd"]
    assert byte_pairs.load(content) is None
    content = document(MERGES)
    del content["model"]["vocab"]["z"]
    assert byte_pairs.load(content) is None


def test_tokens_that_no_merge_makes_are_never_made() -> None:
    content = document(MERGES)
    content["model"]["vocab"] |= {"xyz": 300, "<|end|>": 301}
    check((loaded(content), Tokenizer.from_str(json.dumps(content))), "xyz <|end|> abcd", [])


@pytest.mark.parametrize(
    "model",
    [
        {"dropout": 0.1}, {"unk_token": "a"}, {"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"},
        {"byte_fallback": True}, {"ignore_merges": True}, {"type": "Unigram"},
    ],
    ids=str,
)  # fmt: skip
def test_other_models_are_refused(model: dict[str, Any]) -> None:
    assert byte_pairs.load(document(MERGES, **model)) is None


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT, CUT = splitter(PATTERNS["qwen"])["pretokenizers"]


@pytest.mark.parametrize(
    "steps",
    [
        None, {"type": "Metaspace"}, BYTE_LEVEL | {"add_prefix_space": True}, BYTE_LEVEL | {"use_regex": False}, [SPLIT], [CUT],
        [SPLIT, SPLIT, CUT], [SPLIT, BYTE_LEVEL], [SPLIT, CUT | {"add_prefix_space": True}], [SPLIT | {"invert": True}, CUT],
        [SPLIT | {"behavior": "Removed"}, CUT], [SPLIT | {"pattern": {"String": " "}}, CUT],
        [SPLIT | {"pattern": {"Regex": r"\w+|$"}}, CUT],
    ],
    ids=str,
)  # fmt: skip
def test_other_ways_to_cut_are_refused(steps: Any) -> None:
    step = {"type": "Sequence", "pretokenizers": steps} if isinstance(steps, list) else steps
    assert byte_pairs.load(document(MERGES) | {"pre_tokenizer": step}) is None


@pytest.mark.parametrize("kind", ["NFD", "NFKC", "Lowercase", "Sequence"])
def test_other_normal_forms_are_refused(kind: str) -> None:
    assert byte_pairs.load(document(MERGES) | {"normalizer": {"type": kind, "normalizers": []}}) is None


def test_without_tiktoken_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_pairs, "_tiktoken", None)
    assert byte_pairs.load(document(MERGES)) is None
