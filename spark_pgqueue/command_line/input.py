"""The input of commands: payloads from standard input, and answers to questions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

import typer

from spark_pgqueue.command_line.app import fail
from spark_pgqueue.postgres.errors import PgQueueError

BATCH = 10_000  # the number of lines that `send --lines` holds in memory


def confirm(question: str, yes: bool) -> None:
    if not yes:
        if sys.stdin is None:
            fail("cannot ask for confirmation: standard input is closed", hint="pass --yes")
        typer.confirm(question, abort=True, err=True)


def open_input() -> BinaryIO:
    if sys.stdin is None:
        fail("standard input is closed, so there is nothing to send", hint="pass --data")
    return sys.stdin.buffer


def standard_input() -> bytes:
    file = open_input()
    if sys.stdin.isatty():
        print("Type the message, then press Ctrl-D:", file=sys.stderr)
    # Empty input, as in a cron job, is probably not meant as a message.
    data = file.read()
    if not data:
        fail("standard input is empty", hint="for an empty message, give --data ''")
    return data


def batches(binary: bool) -> Iterator[list[Any]]:
    lines = (payload_of(line.removesuffix(b"\n"), binary) for line in open_input())
    while batch := list(islice(lines, BATCH)):
        yield batch


def payload_of(data: bytes, binary: bool) -> str | bytes:
    try:
        return data if binary else data.decode()
    except UnicodeDecodeError as error:
        raise PgQueueError(
            f"the data is not UTF-8 text: {error}", hint="a stream of kind binary takes any bytes"
        ) from None
