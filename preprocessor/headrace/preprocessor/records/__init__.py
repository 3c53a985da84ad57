"""From a row of a data set to a sample: its text as turns, and its media in their places."""
