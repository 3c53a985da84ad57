"""The preprocessors: which are there, who gets what work under a lease, and who is late, lost or killed by it."""
