"""Waits that are logged now and then."""

from __future__ import annotations


class LogThrottle:
    """Limits the log messages of a wait: a changed message is due at once, the same one again only every `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._words, self._due_s = "", 0.0

    def is_due(self, words: str, now_s: float) -> bool:
        """Return whether to log `words` now."""
        if words == self._words and now_s < self._due_s:
            return False
        self._words, self._due_s = words, now_s + self._every_s
        return True
