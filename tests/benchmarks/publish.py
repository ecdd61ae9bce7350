"""Publishing, against inserting the same rows into a plain table."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import psycopg

from tests.benchmarks.harness import Bench, Target, alternate, run, timed

BATCH = 10_000
CONSUMERS = (1, 3, 10, 100)

PLAIN = """
drop table if exists plain;
create table plain (
    seq         bigint      generated always as identity primary key,
    inserted_at timestamptz not null default statement_timestamp(),
    key         text,
    data        text        not null,
    headers     jsonb
)"""

# Both sides answer the seqs. They are counted in the server and not shipped back.
PLAIN_IN_BULK = """
with sent as (
    insert into plain (key, data, headers)
    select k, d, null from batch cross join lateral unnest(keys, data) x (k, d)
    returning seq
)
select count(seq) from sent
"""

PLAIN_SENT = """
with sent as (
    insert into plain (key, data, headers)
    select k, d, null from unnest(%b::text[], %b::text[]) x (k, d)
    returning seq
)
select count(seq) from sent
"""

SEND_IN_BULK = """
select count(*)
from pgqueue.send_batch('{stream}', (select data from batch), (select keys from batch))
"""

INSERT = b"insert into plain (key, data, headers) values (%s, %s, null)"
SEND = b"select pgqueue.send(%s, %s, %s)"


def publish(bench: Bench) -> None:
    """Publish to 1, 3, 10 and 100 consumers, in bulk and one by one."""
    with bench.connect() as conn:
        run(conn, PLAIN)
        for consumers in CONSUMERS:
            create_stream(conn, f"publish_{consumers}", consumers)
        create_stream(conn, "publish_quietly", 3, notify=False)
        in_bulk(bench, conn)
        one_by_one(bench, conn)
        drop_streams(conn)


def in_bulk(bench: Bench, conn: psycopg.Connection) -> None:
    """Batches of 10,000: as a client sends them, and from arrays that the server has already.

    Sending lists costs a client more than either statement costs the server.
    """
    load_batch(conn)
    ((keys, data),) = run(conn, "select keys, data from batch")
    rounds = 10 if bench.quick else 30

    def measure(sides: dict[str, tuple[str, tuple]], measured: int) -> dict[str, list[float]]:
        works = {name: partial(run, conn, *statement) for name, statement in sides.items()}
        return alternate({name: partial(timed, w) for name, w in works.items()}, measured, 2)

    sent = measure(
        {
            "plain": (PLAIN_SENT, (keys, data)),
            "3": ("select count(*) from pgqueue.send_batch('publish_3', %b, %b)", (data, keys)),
        },
        rounds // 2,
    )
    bench.report.ratio(
        "publish 10,000 messages in a batch, against a plain insert",
        "sent by a client, to 3 consumers",
        sent["3"],
        sent["plain"],
        f"{BATCH}/s",
        target=Target(least=0.9),
    )
    taken = measure(
        {"plain": (PLAIN_IN_BULK, ())}
        | {f"{n}": (SEND_IN_BULK.format(stream=f"publish_{n}"), ()) for n in CONSUMERS},
        rounds,
    )
    for consumers in CONSUMERS:
        bench.report.ratio(
            "publish 10,000 messages in a batch, against a plain insert",
            f"the server's part alone, to {consumers} consumers",
            taken[f"{consumers}"],
            taken["plain"],
            f"{BATCH}/s",
            target=Target(least=0.9) if consumers == 3 else None,
        )
    bench.report.ratio(
        "publish 10,000 messages in a batch, to 100 consumers against to 1",
        "the server's part alone",
        taken["100"],
        taken["1"],
        f"{BATCH}/s",
        target=Target(least=0.91),
    )


def one_by_one(bench: Bench, conn: psycopg.Connection) -> None:
    """Single messages: a transaction each, and many in one transaction."""
    count = 300 if bench.quick else 500
    data, key = "x" * 200, "some key"

    def repeat(sql: bytes, parameters: tuple, in_one: bool) -> float:
        def work() -> None:
            for _ in range(count):
                conn.execute(sql, parameters)

        with conn.transaction() if in_one else nullcontext():
            return timed(work)

    streams = {f"to {n} consumers": f"publish_{n}" for n in CONSUMERS}
    streams["to 3 consumers, without notify"] = "publish_quietly"
    for in_one, way in ((False, "a transaction each"), (True, "in one transaction")):
        sides = {"plain": partial(repeat, INSERT, (key, data), in_one)}
        for name, stream in streams.items():
            sides[name] = partial(repeat, SEND, (stream, data, key), in_one)
        taken = alternate(sides, 5 if bench.quick else 10)
        for name in streams:
            bench.report.ratio(
                f"publish single messages, {way}, against a plain insert",
                name,
                taken[name],
                taken["plain"],
                f"{count}/s",
            )


def load_batch(conn: psycopg.Connection) -> None:
    """The table batch: one row, with the keys and the data (200 characters) of a batch."""
    run(
        conn,
        f"""
        drop table if exists batch;
        create table batch (keys text[], data text[]);
        alter table batch alter keys set storage external, alter data set storage external;
        insert into batch
        select array_agg('key ' || g % 5000), array_agg(lpad(g::text, 200, '0'))
        from generate_series(1, {BATCH}) g""",
    )


def create_stream(
    conn: psycopg.Connection,
    name: str,
    consumers: int,
    *,
    ordering: str = "none",
    notify: bool = True,
) -> None:
    run(
        conn,
        "select pgqueue.create_stream(%s, p_settings => jsonb_build_object('notify', %s))",
        (name, notify),
    )
    for number in range(consumers):
        sql = "select pgqueue.create_consumer(%s, %s, p_start => 'earliest', p_ordering => %s)"
        run(conn, sql, (name, f"c{number}", ordering))


def drop_streams(conn: psycopg.Connection) -> None:
    for (name,) in run(conn, "select name from pgqueue.streams"):
        run(conn, "select pgqueue.drop_stream(%s)", (name,))
