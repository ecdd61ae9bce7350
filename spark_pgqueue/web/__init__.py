"""The page of `pgqueue web`: one file of HTML, and the little server that fills it."""

from spark_pgqueue.web.server import PORT, serve

__all__ = ["PORT", "serve"]
