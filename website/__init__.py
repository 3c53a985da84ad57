"""The documentation as a site: pages of the repository and references made from the code, as Markdown for MkDocs.

`make docs` builds it. Nothing here but `__main__` needs MkDocs, so the suite checks links, navigation and references without it.
`outer_links` is a program of its own.
"""
