"""What is published of a commit: a wheel and a source archive, built twice, tried in an empty environment, summed and signed.

    __main__.py   `python -m release`, in the order of what is done; `make release` runs it
    tree.py       the commit: whether it is clean, which version it is, its files
    notes.py      the notes of a version, cut from the changelog
    building.py   the archives, byte for byte the same whoever builds them
    contents.py   what is in them, and nothing else
    trial.py      an empty environment, in which the wheel must run
    signing.py    sums and their signature

It needs nothing but the standard library, git, and hatchling and twine in the environment that it runs in.
"""
