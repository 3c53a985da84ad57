"""Drawing of a contact sheet: cards of samples, each with its media and its token sequence, in columns on one picture.

This module does not depend on data sets or pipelines. Sizes are in pixels, for viewing at 100 %.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

COLUMNS = 3
_CARD, _PAD, _GAP, _MARGIN, _HEAD = 600, 14, 16, 24, 98
_INNER = _CARD - 2 * _PAD
_LINE, _CELL_TOP = 18, 2
_MAX_LINES, _TAIL_LINES = 30, 9
_MAX_IMAGES, _MAX_SPECTRA = 6, 3
_IMAGE_BOX, _SMALL_BOX = (_INNER, 400), ((_INNER - 2 * 8) // 3, 150)
_SPECTRUM = (_INNER, 96)
_MAX_ZOOM = 4  # largest zoom of images smaller than their box
_MIN_CELL = 7  # smallest square of a token whose borders are drawn

_PAPER, _CARD_FILL, _BORDER, _INK, _QUIET = "#f1f3f5", "#ffffff", "#d5dbe0", "#22303c", "#66757f"
_PLAIN, _LEARNT = ("#edf0f3", "#e0e5ea"), ("#fcdccb", "#f6c3a7")  # two shades each, so that neighbouring tokens differ
_CONTROL_INK, _REFUSED = "#8a3ffc", "#b3261e"
_LEFT_OUT, _GRID = "#fff3cd", (18, 128, 122, 48)
_MEDIA = {"image": "#12807a", "audio": "#6a4c93"}
_UNKNOWN = "\u25a1"  # shown for a character that the font lacks
_VISIBLE = {"\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d", "\u00a0": "\u2423"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token as it is shown, or `count` tokens that are shown as one."""

    text: str
    kind: str
    """`text`, `control`, `image` or `audio`."""
    learnt: bool
    """Whether the token carries loss."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedPicture:
    """A picture of an image or of a recording's spectrogram, with its caption."""

    picture: Image.Image
    caption: str
    cell_px: int | None = None
    """Side of the square of `picture` that one token stands for; None where tokens have no square, as in recordings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the contact sheet shows of one sample; a refused sample has a reason and neither media nor tokens."""

    name: str
    detail: str
    reason: str = ""
    images: tuple[CaptionedPicture, ...] = ()
    spectra: tuple[CaptionedPicture, ...] = ()
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The part of a token's text that is on one line, from character `column` on.

    `shade`, 0 or 1, tells neighbouring tokens apart. The first fragment of a token has the token's count, others have 0.
    """

    column: int
    text: str
    token: Token
    shade: int
    count: int


Line = list[Fragment]


def draw_sheet(cards: Sequence[Card], *, title: str, subtitle: str) -> Image.Image:
    """Draw the whole sheet and return it in mode RGB; each card in turn goes into the shortest column."""
    drawn = [_draw_card(index + 1, card) for index, card in enumerate(cards)]
    columns = min(COLUMNS, len(drawn))
    bottoms = [_HEAD] * columns
    places = []
    for card in drawn:
        column = bottoms.index(min(bottoms))
        places.append((_MARGIN + column * (_CARD + _GAP), bottoms[column]))
        bottoms[column] += card.height + _GAP
    width = 2 * _MARGIN + columns * (_CARD + _GAP) - _GAP
    sheet = Image.new("RGB", (width, max(bottoms) + _MARGIN - _GAP), _PAPER)
    _draw_head(ImageDraw.Draw(sheet), width, title, subtitle)
    for card, place in zip(drawn, places, strict=True):
        sheet.paste(card, place)
    return sheet


def lay_out(tokens: Sequence[Token], width: int) -> list[Line]:
    """Lay tokens out on lines of at most `width` characters; a line feed ends its line, and long tokens are broken."""
    lines: list[Line] = [[]]
    column = 0
    for shade, token in enumerate(tokens):
        count = token.count
        for part, ends_line in _parts(token, width):
            if column + len(part) > width:
                lines.append([])
                column = 0
            lines[-1].append(Fragment(column=column, text=part, token=token, shade=shade % 2, count=count))
            column += len(part)
            count = 0
            if ends_line:
                lines.append([])
                column = 0
    return lines if lines[-1] else lines[:-1]


def cut(lines: list[Line], most: int = _MAX_LINES, tail: int = _TAIL_LINES) -> tuple[list[Line], str, list[Line]]:
    """Cut long texts in the middle: return the first lines, a note on the tokens left out, and the last `tail` lines.

    Nothing is left out, and the note is empty, where there are at most `most` lines.
    """
    if len(lines) <= most:
        return lines, "", []
    head, left_out = lines[: most - tail - 1], lines[most - tail - 1 : -tail]
    fragments = [fragment for line in left_out for fragment in line]
    count = sum(fragment.count for fragment in fragments)
    learnt = sum(fragment.count for fragment in fragments if fragment.token.learnt)
    return head, f"\u2026 {count:,} tokens left out, {learnt:,} with loss \u2026", lines[-tail:]


def _parts(token: Token, width: int) -> Iterator[tuple[str, bool]]:
    """Yield a token's text as shown, in pieces of at most `width` characters, each with whether a line ends behind it."""
    shown = "".join(_shown(character) for character in token.text) or _UNKNOWN
    ends_line = token.text.endswith("\n")
    for start in range(0, len(shown), width):
        yield shown[start : start + width], ends_line and start + width >= len(shown)


def _shown(character: str) -> str:
    character = _VISIBLE.get(character, character)
    return character if character.isprintable() and ord(character) in _glyphs() else _UNKNOWN


def _draw_head(draw: ImageDraw.ImageDraw, width: int, title: str, subtitle: str) -> None:
    draw.text((_MARGIN, 18), _elided(title, _font("Sans-Bold", 20), width - 2 * _MARGIN), _INK, _font("Sans-Bold", 20))
    draw.text((_MARGIN, 48), _elided(subtitle, _font("Sans", 13), width - 2 * _MARGIN), _QUIET, _font("Sans", 13))
    legend = (
        Token(text="with loss", kind="text", learnt=True),
        Token(text="without", kind="text", learnt=False),
        Token(text="control token", kind="control", learnt=False),
        Token(text="<image x n>", kind="image", learnt=False),
        Token(text="<audio x n>", kind="audio", learnt=False),
    )
    left = _MARGIN
    for token in legend:
        left += 10 + _draw_token(draw, left, 70, token.text, token, shade=1)


def _draw_card(number: int, card: Card) -> Image.Image:
    """Draw a card on a canvas that is high enough for its content, and crop the canvas below it."""
    canvas = Image.new("RGB", (_CARD, _max_height(card)), _CARD_FILL)
    draw = ImageDraw.Draw(canvas)
    bold, small = _font("Sans-Bold", 14), _font("Sans", 12)
    draw.text((_PAD, 10), f"{number}", _REFUSED if card.reason else _MEDIA["image"], bold)
    left = _PAD + 10 + int(bold.getlength(f"{number}"))
    draw.text((left, 10), _elided(card.name, bold, _CARD - _PAD - left), _INK, bold)
    if card.reason:
        draw.text((_PAD, 32), f"refused: {card.reason}", _REFUSED, bold)
        top = _draw_words(draw, 54, card.detail)
    else:
        draw.text((_PAD, 31), card.detail, _QUIET, small)
        top = _draw_images(canvas, draw, 54, card.images)
        top = _draw_spectra(canvas, draw, top, card.spectra)
        top = _draw_tokens(draw, top, card.tokens)
    finished = canvas.crop((0, 0, _CARD, top + _PAD))
    frame = ImageDraw.Draw(finished)
    frame.rectangle((0, 0, _CARD - 1, finished.height - 1), outline=_REFUSED if card.reason else _BORDER)
    return finished


def _max_height(card: Card) -> int:
    media = _IMAGE_BOX[1] + 2 * (_SMALL_BOX[1] + 40) + _MAX_SPECTRA * (_SPECTRUM[1] + 40)
    return 120 + media + (_MAX_LINES + len(card.detail) // 20) * _LINE


def _draw_images(canvas: Image.Image, draw: ImageDraw.ImageDraw, top: int, images: Sequence[CaptionedPicture]) -> int:
    """Draw one image large, or several small in rows of three; return the vertical position below them."""
    box, per_row = (_IMAGE_BOX, 1) if len(images) == 1 else (_SMALL_BOX, 3)
    shown = images[:_MAX_IMAGES]
    for start in range(0, len(shown), per_row):
        row = [(captioned, _fitted(captioned, box)) for captioned in shown[start : start + per_row]]
        below = top + max(picture.height for _, picture in row)
        for index, (captioned, picture) in enumerate(row):
            left = _PAD + index * (box[0] + 8)
            canvas.paste(picture, (left, top))
            for line, words in enumerate(_wrapped(captioned.caption, _font("Sans", 11), box[0])):
                draw.text((left, below + 4 + 14 * line), words, _QUIET, _font("Sans", 11))
        top = below + (40 if per_row > 1 else 26)
    return _draw_more(draw, top, len(images) - len(shown), "image")


def _draw_spectra(canvas: Image.Image, draw: ImageDraw.ImageDraw, top: int, spectra: Sequence[CaptionedPicture]) -> int:
    shown = spectra[:_MAX_SPECTRA]
    for captioned in shown:
        canvas.paste(captioned.picture.resize(_SPECTRUM, Image.Resampling.BOX), (_PAD, top))
        draw.text((_PAD, top + _SPECTRUM[1] + 4), captioned.caption, _QUIET, _font("Sans", 11))
        top += _SPECTRUM[1] + 26
    return _draw_more(draw, top, len(spectra) - len(shown), "recording")


def _draw_more(draw: ImageDraw.ImageDraw, top: int, count: int, noun: str) -> int:
    if count <= 0:
        return top
    draw.text((_PAD, top), f"and {count} more {noun}{'' if count == 1 else 's'}", _QUIET, _font("Sans", 12))
    return top + 22


def _draw_tokens(draw: ImageDraw.ImageDraw, top: int, tokens: Sequence[Token]) -> int:
    head, left_out, tail = cut(lay_out(tokens, int(_INNER / _advance())))
    top = _draw_lines(draw, top, head)
    if left_out:
        draw.rectangle((_PAD, top, _CARD - _PAD, top + _LINE - 2), _LEFT_OUT)
        draw.text((_CARD // 2, top + _LINE // 2 - 1), left_out, _QUIET, _font("Sans", 12), anchor="mm")
        top += _LINE
    return _draw_lines(draw, top, tail)


def _draw_lines(draw: ImageDraw.ImageDraw, top: int, lines: Sequence[Line]) -> int:
    for line in lines:
        for fragment in line:
            left = _PAD + round(fragment.column * _advance())
            _draw_token(draw, left, top, fragment.text, fragment.token, shade=fragment.shade)
        top += _LINE
    return top


def _draw_token(draw: ImageDraw.ImageDraw, left: int, top: int, text: str, token: Token, *, shade: int) -> int:
    """Draw a token's text on its background and return its width."""
    fill = _MEDIA.get(token.kind) or (_LEARNT if token.learnt else _PLAIN)[shade]
    ink = "#ffffff" if token.kind in _MEDIA else _CONTROL_INK if token.kind == "control" else _INK
    width = round(len(text) * _advance())
    draw.rectangle((left, top, left + width - 1, top + _LINE - 2), fill)
    draw.text((left, top + _CELL_TOP), text, ink, _font("SansMono-Bold" if token.kind in _MEDIA else "SansMono", 12))
    return width


def _draw_words(draw: ImageDraw.ImageDraw, top: int, words: str) -> int:
    font = _font("Sans", 12)
    for line in _wrapped("".join(map(_shown, words)), font, _INNER):
        draw.text((_PAD, top), line, _INK, font)
        top += _LINE
    return top


def _fitted(captioned: CaptionedPicture, box: tuple[int, int]) -> Image.Image:
    """Return the picture scaled to fit into the box, with its tokens' squares outlined where they are large enough."""
    picture = captioned.picture
    scale = min(box[0] / picture.width, box[1] / picture.height)
    if scale >= 1:
        scale = min(int(scale), _MAX_ZOOM)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    fitted = picture.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)
    if captioned.cell_px is not None and captioned.cell_px * scale >= _MIN_CELL:
        draw = ImageDraw.Draw(fitted, "RGBA")
        for index in range(1, picture.width // captioned.cell_px):
            x = round(index * captioned.cell_px * scale)
            draw.line((x, 0, x, size[1]), _GRID)
        for index in range(1, picture.height // captioned.cell_px):
            y = round(index * captioned.cell_px * scale)
            draw.line((0, y, size[0], y), _GRID)
    return fitted


def _wrapped(words: str, font: ImageFont.FreeTypeFont, width: int) -> Iterator[str]:
    """Yield lines of at most `width` pixels, broken at spaces where possible."""
    line = ""
    for word in words.split(" "):
        while font.getlength(word) > width:
            lengths = range(1, len(word) + 1)
            kept = max(1, bisect_right(lengths, float(width), key=lambda length: font.getlength(word[:length])))
            if line:
                yield line
            yield word[:kept]
            line, word = "", word[kept:]
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) > width:
            yield line
            longer = word
        line = longer
    if line:
        yield line


def _elided(words: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Return the words, with an ellipsis in place of their beginning where they are wider than `width` pixels."""
    words = "".join(map(_shown, words))
    if font.getlength(words) <= width:
        return words
    start = bisect_left(range(len(words)), -float(width), key=lambda start: -font.getlength(f"\u2026{words[start:]}"))
    return f"\u2026{words[start:]}"


@cache
def _font(style: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a DejaVu font from those that come with matplotlib."""
    return ImageFont.truetype(_font_file(style), size)


@cache
def _advance() -> float:
    """Return the width of a character of the token font, in pixels."""
    return _font("SansMono", 12).getlength("m" * 100) / 100


@cache
def _glyphs() -> frozenset[int]:
    """Return the code points that the token font can show."""
    return frozenset(FT2Font(_font_file("SansMono")).get_charmap())


def _font_file(style: str) -> str:
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"DejaVu{style}.ttf")
