"""`make bench-forecast`: the forecast step time of live jobs beside the measured one."""
