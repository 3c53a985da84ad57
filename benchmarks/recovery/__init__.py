"""`make bench-recovery`: how soon training goes on after a loss."""
