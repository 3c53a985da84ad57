"""What the reorder service's web page costs it, and how soon it answers."""
