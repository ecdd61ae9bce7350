"""Workers of a group, in the client and on the command line."""

import json
import threading
from collections import Counter
from datetime import timedelta

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.client import Client
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import wait_until
from tests.sql import clock
from tests.unit.conftest import end_session

MOMENT = timedelta(milliseconds=300)


CONSUMER = None


@pytest.fixture
def queue(queue, conn):
    """Its group "g" of four partitions, and a table "done"."""
    queue.create_group("s", "g", partitions=4, start="earliest")
    conn.execute(
        "create table done (n bigint generated always as identity, seq bigint, key text,"
        " worker text)"
    )
    return queue


def note(messages, conn, worker="w"):
    """A handler that writes down what it was given."""
    with conn.cursor() as cursor:
        cursor.executemany(
            "insert into done (seq, key, worker) values (%s, %s, %s)",
            [(m.seq, m.key, worker) for m in messages],
        )


@pytest.fixture
def done(conn):
    """What was handled."""
    return lambda: conn.execute("select seq, key, worker from done order by n").fetchall()


@pytest.mark.previous_version
def test_a_worker_works_off_everything_once(queue, url, conn, done):
    sent = queue.send_batch("s", ["x"] * 50, keys=[f"k{i % 7}" for i in range(50)])
    worker = queue.group("s", "g")
    assert worker.run(note, max_messages=7, wait=MOMENT) == 50
    assert [seq for seq, _, _ in done()] == sent
    assert worker.run(note, wait=MOMENT) == 0
    assert {p.behind for p in queue.partitions("s", "g")} == {0}
    assert {p.worker for p in queue.partitions("s", "g")} == {None}


def test_a_burst_after_single_messages_comes_in_calls_of_the_wanted_size(queue, url):
    """A poll that finds one message does not say that most messages are for other workers."""
    queue.create_group("s", "one", partitions=1, start="earliest")
    calls = []
    with spark_pgqueue.connect(url) as producer:

        def handle(messages, conn):
            calls.append([m.seq for m in messages])
            if len(calls) < 8:
                producer.send("s", "x")
            elif len(calls) == 8:
                producer.send_batch("s", ["x"] * 300)

        producer.send("s", "x")
        assert queue.group("s", "one").run(handle, max_messages=10, wait=MOMENT) == 308
    assert max(map(len, calls)) == 10
    assert [seq for call in calls for seq in call] == list(range(1, 309))


def test_a_worker_of_some_partitions_gets_its_messages_in_calls_of_the_wanted_size(
    queue, conn, done
):
    """In order and once, however many messages are for others, and over several publications."""
    conn.execute("select from pgqueue.lease_partitions('s', 'g', 'other')")
    conn.execute("select from pgqueue.lease_partitions('s', 'g', 'w')")
    conn.execute(
        "select pgqueue.commit_offset(lease_id, null, true)"
        " from pgqueue.lease_partitions('s', 'g', 'other') where to_release"
    )
    for _ in range(10):
        queue.send_batch("s", ["x"] * 40, keys=[str(i) for i in range(40)])
    planned = conn.execute(
        "select seq from pgqueue.read_partitions('s', 'g', (select array_agg(lease_id)"
        " from pgqueue.lease_partitions('s', 'g', 'w'))) where seq is not null"
    ).fetchall()
    sizes = []

    def handle(messages, conn):
        sizes.append(len(messages))
        note(messages, conn)

    queue.group("s", "g").run(handle, worker="w", max_messages=7, wait=MOMENT)
    assert [seq for seq, _, _ in done()] == [seq for (seq,) in planned]
    assert 100 < len(planned) < 300
    assert max(sizes) == 7
    assert len(sizes) < len(planned) / 4, sizes


def test_a_stop_that_comes_before_the_run_ends_it(queue):
    queue.send("s", "x")
    worker = queue.group("s", "g")
    worker.stop()
    assert worker.run(note, wait=MOMENT) == 0
    assert worker.run(note, wait=MOMENT) == 1


def test_an_error_of_the_handler_ends_the_run_and_undoes_what_it_did(queue, done):
    """Also one that would pass, were the statement not the handler's."""
    queue.send_batch("s", list("abc"))
    fails = "do $$ begin raise serialization_failure; end $$"

    def fail(messages, conn):
        note(messages, conn)
        raise RuntimeError("no")

    for handler, error in (
        (fail, RuntimeError),
        (lambda messages, conn: conn.execute(fails), psycopg.errors.SerializationFailure),
    ):
        with pytest.raises(error):
            queue.group("s", "g").run(handler, wait=MOMENT)
        assert done() == []
    assert queue.group("s", "g").run(note, wait=MOMENT) == 3


def test_a_handler_that_rolls_back_by_a_statement_ends_the_run(queue, done):
    queue.send_batch("s", list("abc"))

    def undo(messages, conn):
        note(messages, conn)
        conn.execute("rollback")

    with pytest.raises(PgQueueError, match="has ended its transaction"):
        queue.group("s", "g").run(undo, wait=MOMENT)
    assert queue.group("s", "g").run(note, wait=MOMENT) == 3
    assert len(done()) == 3


def test_a_handler_that_leaves_a_copy_open_ends_the_run(queue, done):
    queue.send_batch("s", list("abc"))
    left_open = []

    def leave(messages, conn):
        left_open.append(conn.cursor().copy("copy pg_temp.t from stdin"))
        conn.execute("create temp table t (i int)")
        left_open[0].__enter__()

    with pytest.raises(PgQueueError, match="has left a COPY"):
        queue.group("s", "g").run(leave, wait=MOMENT)
    assert queue.group("s", "g").run(note, wait=MOMENT) == 3
    assert len(done()) == 3


def test_who_sleeps_too_long_undoes_its_work_and_goes_on(queue, url, conn, done):
    sent = queue.send_batch("s", ["x"] * 20, keys=[str(i) for i in range(20)])
    slept = []

    def sleep(messages, mine):
        note(messages, mine, "sleeper")
        if not slept:
            slept.append(len(messages))
            clock.end_worker_lease(conn, "sleeper")
            conn.execute("select pgqueue.lease_partitions('s', 'g', 'other')")
            conn.execute("select pgqueue.leave_group('s', 'g', 'other')")

    count = queue.group("s", "g").run(sleep, worker="sleeper", wait=MOMENT)
    assert (slept, count) == ([20], 20)
    assert [seq for seq, _, _ in done()] == sent


def test_a_lost_connection_is_replaced(queue, url, conn, done):
    queue.send_batch("s", ["x"] * 5)
    killed = []

    def lose(messages, mine):
        note(messages, mine)
        if not killed:
            killed.append(mine)
            end_session(conn, mine)

    assert queue.group("s", "g").run(lose, wait=MOMENT) == 5
    assert len(done()) == 5


@pytest.mark.previous_version
def test_workers_share_and_go(queue, url, conn, done):
    """A second worker gets half of the partitions while the first works, and all after its end."""
    clients = [spark_pgqueue.connect(url) for _ in range(2)]
    groups = [client.group("s", "g") for client in clients]
    threads = [
        threading.Thread(
            target=group.run,
            args=(lambda m, c, name=name: note(m, c, name),),
            kwargs={"worker": name, "lease": MOMENT, "max_messages": 10},
        )
        for name, group in zip(("w1", "w2"), groups, strict=True)
    ]

    def shares():
        return Counter(p.worker for p in queue.partitions("s", "g"))

    threads[0].start()
    wait_until(lambda: shares() == {"w1": 4})
    sent = queue.send_batch("s", ["x"] * 40, keys=[str(i) for i in range(40)])
    threads[1].start()
    wait_until(lambda: shares() == {"w1": 2, "w2": 2})
    sent += queue.send_batch("s", ["x"] * 40, keys=[str(i) for i in range(40)])
    wait_until(lambda: len(done()) == 80)
    groups[0].stop()
    wait_until(lambda: shares() == {"w2": 4})
    groups[1].stop()
    for thread in threads:
        thread.join(20)
    assert sorted(seq for seq, _, _ in done()) == sent
    assert {worker for _, _, worker in done()} == {"w1", "w2"}
    for client in clients:
        client.close()


def test_what_is_no_group_is_refused(queue, url):
    queue.create_consumer("s", "c")
    for stream, name, code in [("s", "h", "PQ002"), ("t", "g", "PQ001"), ("s", "c", "PQ006")]:
        with pytest.raises(PgQueueError) as error:
            queue.group(stream, name).run(note)
        assert error.value.sqlstate == code
    with pytest.raises(PgQueueError, match="not 8") as error:
        queue.create_group("s", "g", partitions=8, if_not_exists=True)
    with (
        connection.connect(url) as conn,
        pytest.raises(PgQueueError, match="that the client opened"),
    ):
        Client(conn).group("s", "g")
    with pytest.raises(PgQueueError, match="has no group 'h'"):
        queue.partitions("s", "h")


def test_groups_on_the_command_line(queue, run):
    run("group create s h --partitions 2 --start", "seq 1")
    queue.send("s", "x")
    (g, h) = map(json.loads, run("group list --json").splitlines())
    assert (g["name"], g["partitions"], g["workers"], g["behind"]) == ("g", 4, 0, 1)
    assert (h["name"], h["partitions"]) == ("h", 2)
    queue.group("s", "g").run(lambda *_: None, wait=MOMENT)
    lag = [json.loads(line) for line in run("group lag s g --json").splitlines()]
    assert [(row["partition"], row["behind"]) for row in lag] == [(i, 0) for i in range(4)]
    assert "forgotten" in run("consumer seek s g earliest")
    assert queue.groups("s")[0].behind == 1
    run("consumer drop s h --yes")
    assert "no group 'h'" in run("group lag s h", code=1)
    assert [each.name for each in queue.groups()] == ["g"]
