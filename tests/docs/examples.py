"""Examples in docstrings: what they find when they begin, and how they are run.

There is a stream orders with a consumer billing, and two messages that nobody has received: order 1
of customer 7, order 2 of customer 8. `queue` is a client, `url` its database; there is a table
bills, and beside the package what examples need of the standard library.
"""

from __future__ import annotations

import asyncio
import doctest
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import spark_pgqueue
from spark_pgqueue.client import rates
from spark_pgqueue.postgres import connection


def prepare(url: str) -> dict[str, Any]:
    """What an example finds, in a database that earlier ones may have used."""
    with connection.connect(url) as conn:
        conn.execute("drop table if exists bills cascade")
        for (name,) in conn.execute("select stream from pgqueue.stream_stats").fetchall():
            conn.execute("select pgqueue.drop_stream(%s)", [name])
        conn.execute("create table bills (id bigint primary key, total int)")
        conn.execute("select pgqueue.create_stream('orders')")
        conn.execute("select pgqueue.create_consumer('orders', 'billing')")
        conn.execute(
            "select pgqueue.send_batch('orders', '{order 1, order 2}'::text[],"
            " p_keys => '{customer 7, customer 8}')"
        )
    return {
        "UTC": UTC,
        "asyncio": asyncio,
        "datetime": datetime,
        "embedded": spark_pgqueue.embedded,
        "queue": spark_pgqueue.connect(url),
        "rates": rates,
        "spark_pgqueue": spark_pgqueue,
        "timedelta": timedelta,
        "url": url,
    }


def run(example: doctest.DocTest, namespace: dict[str, Any]) -> None:
    """Run the lines of a docstring. Raises AssertionError where they give something else."""
    said: list[str] = []
    example.globs = namespace
    runner = doctest.DocTestRunner(verbose=False)
    with namespace["queue"]:
        runner.run(example, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)


def run_all(examples: Iterable[doctest.DocTest], url: str, **more: Any) -> None:
    """Run the examples, each from the same beginning. Raises AssertionError for all that fail."""
    failed: list[str] = []
    for example in examples:
        try:
            run(example, prepare(url) | more)
        except AssertionError as error:
            failed.append(f"{example.name}\n{error}")
    assert not failed, "\n".join(failed)
