"""Searches for a placement: how fast they are, and what they find, beside what is published."""
