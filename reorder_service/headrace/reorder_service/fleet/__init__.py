"""The fleet of preprocessors: which are connected, what each has leased, and which are late, lost or killed by their work."""
