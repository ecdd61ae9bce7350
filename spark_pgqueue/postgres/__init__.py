"""Postgres: what to connect to, patience with a restart, statements, errors, and installing.

errors → url → retrying → connection → schema → statements: each needs only those before it. `adbc`
is for executors; `embedded` is a Postgres from PyPI.
"""
