"""`make bench-pipeline`: emulated pipelines beside the simulator, and what runtime and data cost a trainer."""
