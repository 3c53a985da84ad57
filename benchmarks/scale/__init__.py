"""`make bench-scale`: one reorder service beside light ranks and preprocessors."""
