"""`make bench-context`: which rank takes which tokens of a long sequence, and how many ranks take it."""
