"""Measure what a killed node delays, of a Ray cluster of several nodes on this machine.

__main__.py   entry
killed.py     waits of a trainer around the kill of a node
"""
