"""Examples in docstrings: what they find when they begin, and how they are run.

There is a stream orders with a consumer billing, and two messages that nobody has received: order 1
of customer 7, order 2 of customer 8. `queue` is a client, `pgqueue` a tester, `url` their database;
there is a table bills, and beside the package what examples need of the standard library.
"""

from __future__ import annotations

import asyncio
import doctest
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg

import spark_pgqueue
from spark_pgqueue.client import AsyncClient, Client, rates
from spark_pgqueue.postgres import connection
from spark_pgqueue.testing import QueueTester

_BEGINNING: LiteralString = """
    drop table if exists bills cascade;
    select pgqueue.drop_stream(stream) from pgqueue.stream_stats;
    create table bills (id bigint primary key, total int);
    select pgqueue.create_stream('orders');
    select pgqueue.create_consumer('orders', 'billing');
    select pgqueue.send_batch('orders', '{order 1, order 2}'::text[],
                              p_keys => '{customer 7, customer 8}')"""

_NAMES: dict[str, Any] = {
    "AsyncClient": AsyncClient,
    "Client": Client,
    "QueueTester": QueueTester,
    "UTC": UTC,
    "asyncio": asyncio,
    "datetime": datetime,
    "psycopg": psycopg,
    "embedded": spark_pgqueue.embedded,
    "rates": rates,
    "spark_pgqueue": spark_pgqueue,
    "timedelta": timedelta,
}


def run(example: doctest.DocTest, url: str, **more: Any) -> None:
    """Run the lines of a docstring. Raises AssertionError where they give something else.

    Args:
        example: it.
        url: a database with the schema, which earlier examples may have used.
        more: what it finds beside.
    """
    (failure,) = run_all([example], url, **more)
    assert not failure, failure


def run_all(examples: Iterable[doctest.DocTest], url: str, **more: Any) -> Iterator[str]:
    """Run examples, each from the same beginning: what is wrong with it, or nothing."""
    runner = doctest.DocTestRunner(verbose=False)
    with (
        connection.connect(url) as conn,
        spark_pgqueue.connect(url) as queue,
        QueueTester(url) as pgqueue,
    ):
        for example in examples:
            conn.execute(_BEGINNING)
            example.globs = {**_NAMES, "url": url, "queue": queue, "pgqueue": pgqueue, **more}
            said: list[str] = []
            runner.run(example, out=said.append)
            yield "".join([f"{example.name}\n", *said]) if said else ""
