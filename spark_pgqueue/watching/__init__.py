"""Watching a running query: its last micro-batches, live or as a DataFrame."""

from spark_pgqueue.watching.history import history
from spark_pgqueue.watching.watch import watch

__all__ = ["history", "watch"]
