"""Nodes of recoverable jobs: which of them are connected, and what pipelines they form."""
