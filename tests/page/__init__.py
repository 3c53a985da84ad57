"""The page of the reorder service in a real browser: its states, in both themes and on a phone, by keyboard, and its pictures."""
