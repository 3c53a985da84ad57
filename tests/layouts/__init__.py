"""Data sets as other libraries write them, and whether Headrace reads of them what these libraries' own readers read.

    plain.py        samples in a form that every library's can be brought into: turns of texts and digests of media
    material.py     small pictures, sounds and texts, made on the spot
    layout.py       Layout: one way of laying out a data set, how it is written, and how its library reads it
    catalogue.py    all layouts, from the files *_layouts.py, one for each family of writers
    storing.py      `python -m tests.layouts store`: write with the real libraries, read with their readers, keep both
    verdict.py      what Headrace makes of a stored layout: right, refused or wrong
    table.py        docs/layouts.md

`make layouts` installs the libraries, each in an environment of its own, and stores what they write and read in
tests/data/layouts. The tests need none of them: they read the stored files with Headrace and compare. What a layout becomes is
told by its library's reader alone.
"""
