"""The verbs of golden scripts, each in a file of its name: its docstring explains it, and `run` has its arguments."""
