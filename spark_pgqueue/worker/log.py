"""The log of the worker."""

from functools import partial

from spark_pgqueue import printable

LOGGER = "spark_pgqueue.worker"

warn: "partial[None]" = partial(printable.warn, logger=LOGGER)
"""Log a warning: see `printable.warn`."""
