"""The command line `pgqueue`. Each command is one or two calls of the client.

Results go to standard output, everything else to standard error. The exit code is 0 for success, 1
for an error, which is one line and a hint, and 2 for a command line that makes no sense.
"""

from spark_pgqueue.command_line.app import app
from spark_pgqueue.command_line.commands import (
    consumers,
    dead,
    groups,
    messages,
    outcomes,
    schedules,
    schema,
    seeing,
    streams,
    tables,
    upkeep,
    work,
)

__all__ = [
    "app",
    "consumers",
    "dead",
    "groups",
    "messages",
    "outcomes",
    "schedules",
    "schema",
    "seeing",
    "streams",
    "tables",
    "upkeep",
    "work",
]

if __name__ == "__main__":
    app(prog_name="pgqueue")
