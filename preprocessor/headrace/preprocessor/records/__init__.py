"""Turns a row of a data set into a sample: its text as turns, and its media in their places."""
