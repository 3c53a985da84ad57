"""What stands for an image or a recording in a sequence: a placeholder for each of its tokens, and markup around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SHOWN_ROWS = 6  # of tiles, for whose rows and columns published tokenizers have control tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrid:
    """How the tokens of an image are arranged: in rows, in each tile if it is cut into tiles."""

    height: int
    width: int
    rows: int = 1
    """Number of rows of tiles."""
    columns: int = 1
    whole: bool = False
    """Whether the tokens of the whole image follow those of its tiles, as one more tile; they are in front of crops."""
    crops: bool = False
    """Whether the tiles are crops."""


MediumTokens = int | TokenGrid
"""The number of a medium's tokens, or how those of an image are arranged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """The markup of one medium, in which control tokens stand by name."""

    token: str
    """The control token that is repeated, once for each token of the medium."""
    before: str = ""
    """Markup in front; `{number}` in it is that of the medium among those of its kind in the sample, from 1 on."""
    behind: str = ""
    row_break: str = ""
    """Markup between two rows of an image's tokens."""
    tile: str = ""
    """Markup in front of each tile of an image, with its `{row}` and `{column}` from 1 on. `before` and `behind` are then around
    the tokens of the whole image alone. Empty: the tokens of tiles follow each other."""
    tile_row_end: str = ""
    """Markup behind each row of tiles, and once more behind the last one."""
    before_whole: str = ""
    """Text in front of an image that is followed by crops. `before` and `behind` are then around it and around each crop."""
    before_crops: str = ""
    """Text between such an image and its crops. Empty: their tokens follow each other."""
    crop_gap: str = " "
    """Text between two crops."""

    def pieces(self, tokens: MediumTokens, number: int = 1) -> Iterator[str | int]:
        """Yield markup, and numbers of placeholders between it, for one medium."""
        grid = tokens if isinstance(tokens, TokenGrid) else TokenGrid(height=1, width=tokens)
        tiles = grid.rows * grid.columns + grid.whole
        if self.before_crops and grid.crops:
            one, gaps = TokenGrid(height=grid.height, width=grid.width), (self.crop_gap,) * (tiles - 2)
            for text in (self.before_whole, self.before_crops, *gaps):
                yield text
                yield from self.pieces(one, number)
            return
        if self.tile and grid.whole:
            for row in range(grid.rows):
                for column in range(grid.columns):
                    yield self.tile.format(row=row + 1, column=column + 1)
                    yield grid.height * grid.width
                yield self.tile_row_end
            yield self.tile_row_end
            tiles = 1
        yield self.before.replace("{number}", str(number))
        if self.row_break:
            for row in range(tiles * grid.height):
                yield self.row_break * (row > 0)
                yield grid.width
        else:
            yield tiles * grid.height * grid.width
        yield self.behind

    def names(self, token: str) -> bool:
        """Whether a control token is the placeholder or stands in the markup."""
        shown = range(1, _SHOWN_ROWS + 1)
        tiles = [self.tile.format(row=row, column=column) for row in shown for column in shown] if self.tile else []
        return token == self.token or any(token in text for text in (self.before, self.behind, self.row_break, *tiles))
