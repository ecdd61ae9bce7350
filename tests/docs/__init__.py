"""The pages, and the stub, that are generated: `make docs` writes them, a test compares them.

A developer's tool. What it writes is in the repository, so that a reader needs to run nothing.
"""
