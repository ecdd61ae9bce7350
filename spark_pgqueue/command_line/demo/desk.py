"""The desk, which rebooks the passengers of badly delayed flights: a handler for `pgqueue work`.

    pgqueue work spark_pgqueue.command_line.demo.desk:rebook notices desk --transactional

It notes each flight in a table, in the transaction that acknowledges the message: so a flight is
there once, whatever dies. Whom to call for an airline it knows from another table, and in the
beginning one airline is missing there.
"""

from __future__ import annotations

import itertools
import json
import os
import threading

import psycopg

from spark_pgqueue import Retry
from spark_pgqueue.client.messages import Message
from spark_pgqueue.command_line.demo.flights import Figures

STALL = "PGQUEUE_DEMO_STALL"
"""A variable of the environment: after so many flights the desk stands still in the middle of a
transaction, with messages in its hands. So it can be killed just there."""

_TABLES = """
create schema pgqueue_demo;
create table pgqueue_demo.airlines (carrier text primary key, name text not null);
create table pgqueue_demo.rebooked (
    id bigint generated always as identity,
    seq bigint not null,
    aircraft text not null,
    carrier text not null,
    scheduled timestamptz not null,
    minutes int not null
);
"""
_DROP = "drop schema pgqueue_demo cascade"
_KNOW = "insert into pgqueue_demo.airlines values (%s, %s)"
_REBOOK = """
insert into pgqueue_demo.rebooked (seq, aircraft, carrier, scheduled, minutes)
select %(seq)s, %(aircraft)s, carrier, %(scheduled)s::timestamptz, %(minutes)s
from pgqueue_demo.airlines where carrier = %(carrier)s
"""
_COUNT = "select count(*) from pgqueue_demo.rebooked"
# What was dead comes after later flights of its aircraft: only the others have an order.
_FIGURES = """
select count(*), coalesce(sum(minutes), 0)::bigint, count(*) - count(distinct seq),
       count(*) filter (where scheduled < before)
from (
    select seq, minutes, null as scheduled, null as before
    from pgqueue_demo.rebooked where carrier = %(redriven)s::text
    union all
    select seq, minutes, scheduled, lag(scheduled) over (partition by aircraft order by id)
    from pgqueue_demo.rebooked where carrier is distinct from %(redriven)s::text
) r
"""
_AIRLINES = "select carrier, count(*) from pgqueue_demo.rebooked group by carrier"

_handled = itertools.count(1)


def rebook(message: Message, connection: psycopg.Connection) -> None:
    """Note a flight, in the transaction that acknowledges its message.

    Raises:
        Retry: nobody knows its airline.
    """
    flight = json.loads(message.data)
    given = {
        "seq": message.seq,
        "aircraft": (message.key or "").partition(".")[2],
        "carrier": flight["carrier"],
        "scheduled": flight["scheduled"],
        "minutes": flight["dep_delay"],
    }
    if connection.execute(_REBOOK, given).rowcount == 0:
        raise Retry(f"whom to call for {flight['carrier']}?")
    if STALL in os.environ and next(_handled) > int(os.environ[STALL]):
        threading.Event().wait()


class Desk:
    """The tables of the desk.

    Args:
        connection: of the database, with autocommit.
    """

    def __init__(self, connection: psycopg.Connection):
        self._connection = connection

    def create(self, airlines: dict[str, str]) -> None:
        """Make the tables, in a schema of their own, with the names of airlines by their codes."""
        self._connection.execute(_TABLES)
        for carrier, name in airlines.items():
            self.tell(carrier, name)

    def drop(self) -> None:
        """Drop them."""
        self._connection.execute(_DROP)

    def tell(self, carrier: str, name: str) -> None:
        """Let the desk know one more airline."""
        self._connection.execute(_KNOW, [carrier, name])

    def count(self) -> int:
        """How many flights were rebooked."""
        (count,) = self._connection.execute(_COUNT).fetchone() or (0,)
        return count

    def figures(self, redriven: str | None) -> Figures:
        """What the desk saw; `redriven`: the airline whose flights were dead for a while."""
        found = self._connection.execute(_FIGURES, {"redriven": redriven}).fetchone()
        count, minutes, twice, out_of_order = found or (0, 0, 0, 0)
        return {
            "desk: delayed flights": count,
            "desk: airlines": dict(self._connection.execute(_AIRLINES).fetchall()),
            "desk: minutes late": minutes,
            "desk: twice": twice,
            "desk: out of order": out_of_order,
        }
