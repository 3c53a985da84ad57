"""Orchestration: how many GPUs each unit of a model gets on a cluster, and in which parallelism, before anything is trained."""
