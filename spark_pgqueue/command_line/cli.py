"""The command line `pgqueue`. Each command is one or two calls of the client.

Results go to standard output, everything else to standard error. The exit codes are in app.py; the
help has them, and the order in which it lists commands is there too.
"""

from spark_pgqueue.command_line.app import app
from spark_pgqueue.command_line.commands import (
    checkpoint,
    consumers,
    dead,
    groups,
    messages,
    outcomes,
    peeking,
    schedules,
    schema,
    seeing,
    server,
    streams,
    tables,
    upkeep,
    work,
)

__all__ = [
    "app",
    "checkpoint",
    "consumers",
    "dead",
    "groups",
    "messages",
    "outcomes",
    "peeking",
    "schedules",
    "schema",
    "seeing",
    "server",
    "streams",
    "tables",
    "upkeep",
    "work",
]

if __name__ == "__main__":
    app(prog_name="pgqueue")
