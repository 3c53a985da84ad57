"""The nodes of recoverable jobs: which are there, and what pipelines they make."""
