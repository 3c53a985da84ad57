"""`make gpu-check`: what only a GPU can show of the trainer: right results, no waiting, memory, speed."""
