"""`make bench-colocated`: plans for ranks that have all units (FSDP, DDP), beside arrival order, LPT and pipeline plans."""
