"""Handlers for workers in other processes, which write into a table done."""

from __future__ import annotations

import os
import time
from functools import cache

import psycopg


@cache
def conn() -> psycopg.Connection:
    """To the database of PGQUEUE_TEST_HANDLERS."""
    return psycopg.connect(os.environ["PGQUEUE_TEST_HANDLERS"], autocommit=True)


def note(message):
    """Write down a message, at once."""
    conn().execute(
        "insert into done (seq, key, count) values (%s, %s, %s)",
        [message.seq, message.key, message.deliver_count],
    )


def note_in_transaction(message, connection):
    """Write it down in the transaction of the acknowledgement."""
    connection.execute(
        "insert into done (seq, key, count) values (%s, %s, %s)",
        [message.seq, message.key, message.deliver_count],
    )


def do_as_told(message):
    """Do once what the message says, and write it down the next time."""
    if message.deliver_count == 1:
        if message.data == "die":
            os.kill(os.getpid(), 9)
        if message.data == "exit":
            os._exit(3)
        if message.data == "sleep":
            time.sleep(60)
    note(message)


async def note_async(message):
    """As `note`."""
    note(message)


def upper(message, connection=None):
    """Something to keep."""
    return message.data.upper()


def upper_all(messages):
    """Something to keep of a batch."""
    return [upper(message) for message in messages]
