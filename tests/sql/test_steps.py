"""One receive calls the functions that `sql/one-receive.md` lists, and no others."""

import re

import psycopg
import pytest

from spark_pgqueue.postgres import schema
from tests.measure.ways import called
from tests.sql.queue import call, claim_of, value

PAGE = "one-receive.md"
TRIES = 20


def listed(column: str) -> set[str]:
    """The functions with a figure in a column of the page's tables."""
    text = (schema.sql_directory() / PAGE).read_text()
    found = set()
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1] == "function":
            columns = cells
        elif len(cells) == 5 and cells[0].isdigit() and column in columns:
            (name,) = re.findall(r"`[\w/]+\.sql`: `(\w+)`", cells[1])
            if cells[columns.index(column)]:
                found.add(name)
    return found - {"ack"}


def receive(conn: psycopg.Connection) -> tuple[int, set[str]]:
    """Receive a message; its claim, and the functions that were called."""
    rows, found = called(conn, lambda: call(conn, "receive", "s", "c", 1))
    names = {name.partition(".")[2] for name in found}
    return claim_of(rows), {
        re.sub(r"^(payload|keys)_\d+$", "make_stream_functions", name) for name in names
    }


def send(conn: psycopg.Connection, count: int) -> None:
    if count:
        call(conn, "send_batch", "s", ["x"] * count, [f"key {number}" for number in range(count)])


@pytest.mark.parametrize(
    ("column", "ordering", "waiting", "fresh"),
    [
        ("new", "none", 0, 1),
        ("cut", "none", 3, 0),
        ("assigned", "key", 3, 0),
        ("assigns", "key", 0, 2),
    ],
)
def test_a_receive_calls_the_functions_of_its_steps(
    conn: psycopg.Connection, column: str, ordering: str, waiting: int, fresh: int
) -> None:
    """The first claims, and one each second, do more: so it is tried again."""
    value(conn, "create_stream", "s")
    value(conn, "create_consumer", "s", "c", p_ordering=ordering)
    conn.execute("set track_functions = 'all'")
    expected = listed(column)
    assert len(expected) >= 5
    found: set[str] = set()
    for _ in range(TRIES):
        for count in (1, 1 + waiting):  # the first claim has the consumer's lock
            send(conn, count)
            value(conn, "ack", claim_of(call(conn, "receive", "s", "c", 1)))
        send(conn, fresh)  # what is received is new then
        claim, found = receive(conn)
        value(conn, "ack", claim)
        if found == expected:
            return
        while rows := call(conn, "receive", "s", "c", 1):
            value(conn, "ack", claim_of(rows))
    assert found == expected, (found - expected, expected - found)
