"""A crew of processes that run the tests: forks of the one that has collected them, as to import and collect takes half a minute.

`pytest -p tests.crew.crew_plugin --crew 3`. A file's tests are run by one member, one after the other.
"""
