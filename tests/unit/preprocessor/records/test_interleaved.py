"""Interleaved documents: lists with nulls as OBELICS has them, and sentences with matched images as MMC4 has them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.preprocessor.records.conversing import refusal, said

SENTENCES = ["A barn.", "It is red.", "The end."]


def mmc4(*indices: Any, **more: Any) -> dict[str, Any]:
    infos = [
        {"image_name": f"{number}.jpg", "raw_url": "https://example.org/a.jpg", "matched_text_index": index}
        for number, index in enumerate(indices)
    ]
    return {"text_list": SENTENCES, "image_info": infos, "similarity_matrix": [[0.1]], "url": "https://example.org", **more}


@pytest.mark.parametrize("image", ["a", b"a", {"bytes": b"a", "path": "x.jpg"}], ids=repr)
def test_texts_and_images_with_nulls_in_the_others_place(image: Any) -> None:
    fields = {"texts": ["One. ", None, "Two.", None], "images": [None, image, None, "b"], "metadata": "[]"}
    assert said(fields) == ["document: One. [a]Two.[b]"]
    assert said({"row": {"t": fields["texts"], "i": fields["images"]}}, text="row.t", images="row.i") == said(fields)
    assert said({"texts": ["Words only."], "images": [None]}) == ["document: Words only."]
    assert said({"texts": [None, "A barn."], "images": ["a", None]}, text="texts", images="images") == ["document: [a]A barn."]


@pytest.mark.parametrize(
    ("texts", "images", "detail"),
    [
        (["a", None], None, "texts and images have nulls in each other's place, so they must be of one length"),
        (["a", None], ["a"], "so they must be of one length"),
        (["a", None], "a", "so they must be of one length"),
        (["a", None], [None, None], "texts[1] and images[1] are both null"),
        (["a", None], ["b", "c"], "texts[0] and images[0] are both there"),
        (["a", None], [None, 3], "images: expected a name"),
        (["a", None], [None, "https://example.org/a.jpg"], "images is the address https://example.org/a.jpg"),
        (["<image>", None], [None, "a"], "1 of 2 places for an image say which one it is"),
        (["a", None, 3], [None, "a", None], "texts[0]: expected a turn"),
        (["a", "b"], [None, "c"], "texts[1] and images[1] are both there"),
        (["a", "b"], [None], "so they must be of one length"),
    ],
    ids=repr,
)
def test_lists_that_do_not_fit_are_refused(texts: Any, images: Any, detail: str) -> None:
    assert detail in refusal({"texts": texts, "images": images})


def test_matched_images_stand_in_front_of_their_sentences() -> None:
    assert said(mmc4(1)) == ["document: A barn. [0.jpg]It is red. The end."]
    assert said(mmc4(2, 0, 2)) == ["document: [1.jpg]A barn. It is red. [0.jpg][2.jpg]The end."]
    assert said(mmc4()) == ["document: A barn. It is red. The end."]
    encoded = {"image_base64": "QQ==", "image_name": "a.jpg", "matched_text_index": 0}
    assert said(mmc4(image_info=[encoded])) == ["document: [A]A barn. It is red. The end."]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        (mmc4(3), "image_info[0].matched_text_index: expected an index of text_list, got 3"),
        (mmc4(-1), "got -1"),
        (mmc4(None), "got None"),
        (mmc4(True), "got True"),
        (mmc4(text_list="a"), "text_list: expected a list of strings, got a"),
        (mmc4(text_list=["a", None]), "text_list: expected a list of strings"),
        (mmc4(image_info={"a": 1}), "image_info: expected a list, got dict"),
        (mmc4(image_info=["a"]), "image_info[0].matched_text_index: expected an index"),
        (mmc4(image_info=[{"matched_text_index": 0}]), "image_info[0]: expected image_base64 or image_name, got neither"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_rows_of_another_shape_are_refused(fields: dict[str, Any], detail: str) -> None:
    assert detail in refusal(fields)


def test_a_picture_that_no_sentence_matches_is_refused() -> None:
    assert refusal(mmc4(0), ("0.jpg", "1.jpg")).startswith("unused_media: nothing uses the member 1.jpg")
    assert said(mmc4(0), ("0.jpg",)) == ["document: [0.jpg]A barn. It is red. The end."]
