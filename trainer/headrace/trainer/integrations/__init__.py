"""Loaders for the training loops of other libraries, a file each. Nothing of a library is imported unless its file is."""
