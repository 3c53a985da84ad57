"""Golden scripts: what the reorder service does, told as commands and the state that follows from them. See `script.py`."""
