"""Moving a consumer in a long history; what a filter costs for each message."""

from __future__ import annotations

from tests.benchmarks.harness import Bench, Line, Target, low, run, timed
from tests.benchmarks.publish import create_stream, drop_streams
from tests.sql import internals

MOVES = "move a consumer, in a history of single messages"
FILTERS = "a consumer's cost for each message of its stream: taken, filtered, claimed, acknowledged"
SEND = """
select count(*) from pgqueue.send_batch('filters', array(
    select jsonb_build_object('total', i % 100, 'text', repeat('x', 150))::text
    from generate_series(1, 10000) i),
    array(select format('orders.%s.%s', i, (array['eu', 'us'])[i % 2 + 1])
          from generate_series(1, 10000) i))
"""
CONSUMERS = {
    "none": "",
    "a topic, half of them pass": ", p_topic => 'orders.*.eu'",
    "a topic, by key": ", p_topic => 'orders.*.eu', p_ordering => 'key'",
    "a jsonpath, half of them pass": ", p_where => '$.data.total >= 50'",
}


def positions(bench: Bench) -> None:
    """Run all of it."""
    _moves(bench)
    _filters(bench)


def _moves(bench: Bench) -> None:
    million = 1_000_000
    history = million if bench.quick else 10 * million
    with bench.connect() as conn:
        create_stream(conn, "moves", 1)
        stream = run(conn, "select stream_id from pgqueue.open_stream('moves')")[0][0]
        for _ in range(history // million):
            internals.publish_singly(conn, stream, million)
        conn.execute("vacuum analyze pgqueue.publications")
        middle = "select published_at::text from pgqueue.publications where publication_id = %s"
        places = {
            "to the beginning": "earliest",
            "to the end": "latest",
            "to a time": run(conn, middle, (history // 2,))[0][0],
            "to a number": f"seq {history // 2}",
        }
        seek = "select pgqueue.seek('moves', 'c0', %s)"
        for name, position in places.items():
            took = [timed(lambda position=position: run(conn, seek, (position,))) for _ in range(9)]
            value = low(took) * 1000
            bench.report.add(Line(MOVES, f"{name}, of {history:,}", value, "ms", Target(most=20)))
        # no consumer knows the past, and somebody publishes: then it is what maintain() noted
        run(conn, "select from pgqueue.maintain()")
        run(conn, "select pgqueue.drop_consumer('moves', 'c0')")
        create = "select pgqueue.create_consumer('moves', 'c0', %s)"
        with bench.connect() as producer, producer.transaction(force_rollback=True):
            run(producer, "select pgqueue.send('moves', 'x')")
            for name, position in places.items():
                took = []
                for _ in range(9):
                    took.append(timed(lambda position=position: run(conn, create, (position,))))
                    run(conn, "select pgqueue.drop_consumer('moves', 'c0')")
                name = f"created {name}, beside a producer"
                bench.report.add(Line(MOVES, name, low(took) * 1000, "ms", Target(most=20)))
        run(conn, create, ("latest",))
        replay = "select pgqueue.replay('moves', 'c0', 'earliest')"
        run(conn, seek, ("latest",))
        value = timed(lambda: run(conn, replay)) * 1000
        bench.report.add(Line(MOVES, f"replay all {history:,}", value, "ms", Target(most=20)))
        drop_streams(conn)


def _filters(bench: Bench) -> None:
    batches = 3 if bench.quick else 20
    with bench.connect() as conn:
        create_stream(conn, "filters", 0)
        for name, options in CONSUMERS.items():
            run(
                conn,
                f"select pgqueue.create_consumer('filters', '{name}', 'earliest'{options})",
            )
        for _ in range(batches):
            run(conn, SEND)
        conn.execute("vacuum analyze")

        def drain(name: str) -> None:
            while claim := run(
                conn, "select claim_id from pgqueue.claim('filters', %s, 10000)", (name,)
            ):
                run(conn, "select pgqueue.ack(%s)", claim[0])

        for name in CONSUMERS:
            value = timed(lambda name=name: drain(name)) * 1e6 / (batches * 10_000)
            bench.report.add(Line(FILTERS, name, value, "us"))
        drop_streams(conn)
