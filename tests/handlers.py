"""Handlers for workers in other processes, which write into a table done."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from pathlib import Path

import psycopg

from spark_pgqueue import AsyncClient, Client, Reject, Retry

TABLE = """
create table done (n bigint generated always as identity, seq bigint, key text, count int,
                   at timestamptz default clock_timestamp())
"""


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


def note_and_ack(message):
    """The same in a transaction of its own; the first time, the message says what comes before
    the commit."""
    with psycopg.connect(os.environ["PGQUEUE_TEST_HANDLERS"]) as connection:
        note_in_transaction(message, connection)
        Client(connection).ack_message(message)
        if message.deliver_count == 1:
            _end(message.data)


async def note_and_ack_async(message):
    """As `note_and_ack`."""
    url = os.environ["PGQUEUE_TEST_HANDLERS"]
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute(
            "insert into done (seq, key, count) values (%s, %s, %s)",
            [message.seq, message.key, message.deliver_count],
        )
        await AsyncClient(connection).ack_message(message)
        if message.deliver_count == 1:
            _end(message.data)


def note_and_ack_all(messages):
    """As `note_and_ack`, for each message of a batch."""
    for message in messages:
        note_and_ack(message)


def _end(how):
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("before the commit")


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


def begin(given, connection=None):
    """Note a message, or one of a batch, and take longer than any test; but not for quick ones."""
    for message in given if isinstance(given, list) else [given]:
        if message.data != "quick":
            note(message)
            time.sleep(600)


async def begin_async(message):
    """As `begin`, for a task."""
    if message.data != "quick":
        note(message)
        await asyncio.sleep(600)


async def note_async(message):
    """As `note`."""
    note(message)


def upper(message, connection=None):
    """Something to keep."""
    return message.data.upper()


def upper_all(messages):
    """Something to keep of a batch."""
    return [upper(message) for message in messages]


def fail_if_bad(message):
    """Fails by what the message says."""
    if message.data == "bad":
        raise Retry("no")


# What comes back is not the end of the work


def note_later(message):
    """A decorated coroutine function."""
    return note_async(message)


note_by_partial = partial(note_later)


class note_awaitable:
    """A class whose objects are awaited."""

    def __init__(self, message):
        self._message = message

    def __await__(self):
        return note_async(self._message).__await__()


def note_in_a_map(message):
    """Nobody iterates."""
    return map(note, [message])


async def _retry():
    return Retry("no")


def retry_later(message):
    """A verdict, after a wait."""
    return _retry()


def rejected(message):
    """The class of a verdict."""
    return Reject


@contextmanager
def wrapping(message):
    """For the option wrap."""
    yield


async def wrap_later(message):
    """The same, to be awaited."""
    return wrapping(message)


@asynccontextmanager
async def wrapping_async(message):
    """Entered by `async with`."""
    yield


def do_by_name(message):
    """As the handler that the message names."""
    return globals()[message.data](message)


def rejected_by_a_class_of_its_own(message):
    """A class that pickle does not find."""

    class Own(Reject):
        pass

    raise Own("its own")


class Unreadable:
    """What only its own process can make."""

    def __reduce__(self):
        return _unreadable, ()


def _unreadable():
    raise OSError("no such thing here")


def note_and_return_the_unreadable(message):
    """The work is done all the same."""
    note(message)
    return Unreadable()


# What starts processes


def _square(number):
    return number * number


def note_with_a_pool(message):
    """Children of a child, by fork; also of daemons."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_square, [1, 2]) == [1, 4]
    note(message)


def note_programs(message):
    """Notes a program that lasts (key: its number; count: signals to end it that it ignores)."""
    program = subprocess.Popen(["sleep", "100"])
    status = Path(f"/proc/{program.pid}/status").read_text()
    ignored = int(status.split("SigIgn:")[1].split()[0], 16)  # 64 bits: others may be set
    ends = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1
    sql = "insert into done (seq, key, count) values (%s, %s, %s)"
    conn().execute(sql, [message.seq, str(program.pid), ignored & ends])
    if message.data == "die":
        os._exit(3)
    time.sleep(100)


class Leaves:
    """Ends the process that pickles it."""

    def __reduce__(self):
        raise SystemExit(5)


def note_and_return_what_leaves(message):
    """The work is done all the same."""
    note(message)
    return Leaves()


class Number(int):
    """A number of a class that only its own process can make."""

    def __reduce__(self):
        return _unreadable, ()


def rejected_with_details_of_its_own(message):
    """The verdict is the outcome all the same."""
    note(message)
    raise Reject("its own", details={"n": Number(3)})
