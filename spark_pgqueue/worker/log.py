"""The log of the worker."""

from functools import partial

from spark_pgqueue import printable

LOGGER = "spark_pgqueue.worker"

warn: "partial[None]" = partial(printable.warn, logger=LOGGER)
"""Log a warning: see `printable.warn`."""


def counted(count: int | None, one: str, many: str) -> str:
    """A number with its noun: `1 call`, `2 calls`."""
    return f"{count or 0} {one if count == 1 else many}"
