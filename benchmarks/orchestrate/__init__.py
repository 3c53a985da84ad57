"""`make bench-orchestrate`: how models are divided among GPUs, beside what papers report; everything is SIMULATED."""
