"""How many examples of a property are drawn: some in the suite, all with `--thorough`.

They are the same ones every time: more of them find what fewer do not, but find it the first time.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings

THOROUGH = "thorough"
SHARE = 0.2
"""Of all examples, the share that the suite draws ..."""
LEAST = 10
"""... and so many at least, where there are as many."""
USUAL = 100
"""Examples of a property that names no number."""


def load(*, thorough: bool) -> None:
    """Take the profile in which all are drawn, or that of the suite. It must be loaded before the tests are imported."""
    for name, drawn in ((THOROUGH, USUAL), ("suite", _share(USUAL))):
        settings.register_profile(name, derandomize=True, deadline=None, max_examples=drawn)
    settings.load_profile(THOROUGH if thorough else "suite")


def with_examples(count: int, **options: Any) -> settings:
    """Draw so many examples of a property, or their share: a decorator of its test. options: as hypothesis takes them."""
    drawn = count if settings.get_current_profile_name() == THOROUGH else _share(count)
    return settings(max_examples=drawn, **options)


def _share(count: int) -> int:
    return max(min(count, LEAST), math.ceil(SHARE * count))
