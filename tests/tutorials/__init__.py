"""README.md, docs/orchestrate.md and the pages of docs/tutorials and docs/coming-from, carried out word for word.

    tutorial_page.py      what a page's blocks are: run, saved in a file, or compared with an output
    tutorial_session.py   one bash, in which the blocks of a page run one after the other
    empty_environment.py  an environment with nothing but the wheel, for whom `make test-tutorials` runs README.md and tutorials
    coming_from.py        the data that the conversions of docs/coming-from read
    __main__.py           `python -m tests.tutorials PAGE.md`: run a page, and print what came of each block

A block of `bash` is run. A block of `python` or `yaml` whose first line is `# NAME.py` is saved under that name; other blocks of
`python` are run. A block of `text` has lines that the output of the block before must have, in this order: `...` on a line of its
own stands for any lines, an ellipsis within a line for any characters, and blanks and the lines of tables count as one blank.
Below `<!-- numbers may differ -->` any number stands for any other. Blocks of other languages and indented ones are read only.

The tutorials name ports, as readers need some (PORTS). A test puts free ones in their place, and theirs back into the output.
README.md has those that services listen at by themselves, which must be free.
"""
