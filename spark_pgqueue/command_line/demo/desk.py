"""The desk, which rebooks the passengers of badly delayed flights: a handler for `pgqueue work`.

    pgqueue work spark_pgqueue.command_line.demo.desk:rebook notices desk --transactional

It inserts each flight into a table, in the transaction that acknowledges the message: so a flight
is inserted once, whatever process is killed. The names of airlines are in another table, where one
airline is missing at first.
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
"""An environment variable: after this number of flights the desk hangs in a transaction, and holds
claimed messages, so that it can be killed there."""

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
# Redriven dead letters come after later flights of their aircraft: only other messages are ordered.
_FIGURES = """
select count(*), coalesce(sum(minutes), 0)::bigint,
       count(*) - pg_catalog.count(distinct seq), count(*) filter (where scheduled < before)
from (
    select seq, minutes, null as scheduled, null as before
    from pgqueue_demo.rebooked where carrier = %(redriven)s::text
    union all
    select seq, minutes, scheduled,
           pg_catalog.lag(scheduled) over (partition by aircraft order by id)
    from pgqueue_demo.rebooked where carrier is distinct from %(redriven)s::text
) r
"""
_AIRLINES = "select carrier, count(*) from pgqueue_demo.rebooked group by carrier"

_handled = itertools.count(1)


def rebook(message: Message, connection: psycopg.Connection) -> None:
    """Insert a flight, in the transaction that acknowledges its message.

    Raises:
        Retry: its airline is unknown.
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
        """Create the tables, in a separate schema, with the names of airlines by their codes."""
        self._connection.execute(_TABLES)
        for carrier, name in airlines.items():
            self.tell(carrier, name)

    def drop(self) -> None:
        """Drop the tables."""
        self._connection.execute(_DROP)

    def tell(self, carrier: str, name: str) -> None:
        """Add an airline."""
        self._connection.execute(_KNOW, [carrier, name])

    def count(self) -> int:
        """The number of rebooked flights."""
        (count,) = self._connection.execute(_COUNT).fetchone() or (0,)
        return count

    def figures(self, redriven: str | None) -> Figures:
        """The figures of the desk; `redriven` is the airline whose messages were dead letters."""
        found = self._connection.execute(_FIGURES, {"redriven": redriven}).fetchone()
        count, minutes, twice, out_of_order = found or (0, 0, 0, 0)
        return {
            "desk: delayed flights": count,
            "desk: airlines": dict(self._connection.execute(_AIRLINES).fetchall()),
            "desk: minutes late": minutes,
            "desk: twice": twice,
            "desk: out of order": out_of_order,
        }
