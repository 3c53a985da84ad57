"""`make bench-transport`: payload from process to process."""
