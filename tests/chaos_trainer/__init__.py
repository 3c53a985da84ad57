"""Recoverable training whose nodes are lost at every place of a step and of a recovery: what is learned comes out the same."""
