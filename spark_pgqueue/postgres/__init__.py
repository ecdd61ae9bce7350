"""Postgres: connections, retries during a restart, statements, errors, and the installation.

errors → url → retrying → connection → schema → statements: each imports only those before it.
`adbc` is for executors; `embedded` is a Postgres from PyPI.
"""
