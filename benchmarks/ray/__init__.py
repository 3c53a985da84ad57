"""Measure preprocessors on a Ray cluster of several nodes on this machine: what a killed node delays, and what Ray costs.

__main__.py   entry
killed.py     waits of a trainer around the kill of a node
hosted.py     samples per second beside plain processes, and beside Ray Data
"""
