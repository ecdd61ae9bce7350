"""The command line `pgqueue`. Each command is one or two calls of the client.

`spark_pgqueue/__main__.py` is the program, which mostly imports one of these modules.

Results go to standard output, everything else to standard error. app.py has the exit codes, which
the help shows, and the order of the commands in the help.
"""

from spark_pgqueue.command_line.app import app
from spark_pgqueue.command_line.commands import (
    archive,
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
    "archive",
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
