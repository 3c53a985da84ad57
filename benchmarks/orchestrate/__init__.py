"""`make bench-orchestrate`: how models are divided among GPUs, and how soon that is found, beside what papers report."""
