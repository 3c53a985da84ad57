"""`make bench-orchmllm`: ranks that have all units and meet after every phase, beside what OrchMLLM's paper reports of them."""
