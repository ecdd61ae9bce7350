"""Workers of a group, in the client and on the command line."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.client import Client
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import wait_until
from tests.sql import clock

MOMENT = timedelta(milliseconds=300)


@pytest.fixture
def queue(url):
    """A client, with a stream "s", its group "g" of four partitions, and a table "done"."""
    with spark_pgqueue.connect(url) as client, connection.connect(url) as conn:
        client.create_stream("s")
        client.create_group("s", "g", partitions=4, start="earliest")
        conn.execute(
            "create table done (n bigint generated always as identity, seq bigint, key text,"
            " worker text)"
        )
        yield client


def note(messages, conn, worker="w"):
    """A handler that writes down what it was given."""
    with conn.cursor() as cursor:
        cursor.executemany(
            "insert into done (seq, key, worker) values (%s, %s, %s)",
            [(m.seq, m.key, worker) for m in messages],
        )


def done(url):
    with connection.connect(url) as conn:
        return conn.execute("select seq, key, worker from done order by n").fetchall()


def test_a_worker_works_off_everything_once(queue, url):
    sent = queue.send_batch("s", ["x"] * 50, keys=[f"k{i % 7}" for i in range(50)])
    worker = queue.group("s", "g")
    assert worker.run(note, max_messages=7, wait=MOMENT) == 50
    assert [seq for seq, _, _ in done(url)] == sent
    assert worker.run(note, wait=MOMENT) == 0
    assert {p.behind for p in queue.partitions("s", "g")} == {0}
    assert {p.worker for p in queue.partitions("s", "g")} == {None}


def test_a_stop_that_comes_before_the_run_ends_it(queue):
    queue.send("s", "x")
    worker = queue.group("s", "g")
    worker.stop()
    assert worker.run(note, wait=MOMENT) == 0
    assert worker.run(note, wait=MOMENT) == 1


def test_a_statement_of_the_handler_that_fails_ends_the_run(queue):
    """Also by an error that would pass, were the statement not the handler's."""
    queue.send("s", "x")

    def fail(_, conn):
        conn.execute("do $$ begin raise serialization_failure; end $$")

    with pytest.raises(psycopg.errors.SerializationFailure):
        queue.group("s", "g").run(fail, wait=MOMENT)


def test_an_error_of_the_handler_ends_the_run_and_undoes_what_it_did(queue, url):
    queue.send_batch("s", list("abc"))

    def fail(messages, conn):
        note(messages, conn)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        queue.group("s", "g").run(fail)
    assert done(url) == []
    assert queue.group("s", "g").run(note, wait=MOMENT) == 3


def test_who_sleeps_too_long_undoes_its_work_and_goes_on(queue, url):
    sent = queue.send_batch("s", ["x"] * 20, keys=[str(i) for i in range(20)])
    slept = []

    def sleep(messages, conn):
        note(messages, conn, "sleeper")
        if not slept:
            slept.append(len(messages))
            with connection.connect(url) as other:
                clock.end_worker_lease(other, "sleeper")
                other.execute("select pgqueue.lease_partitions('s', 'g', 'other')")
                other.execute("select pgqueue.leave_group('s', 'g', 'other')")

    count = queue.group("s", "g").run(sleep, worker="sleeper", wait=MOMENT)
    assert (slept, count) == ([20], 20)
    assert [seq for seq, _, _ in done(url)] == sent


def test_a_lost_connection_is_replaced(queue, url):
    queue.send_batch("s", ["x"] * 5)
    killed = []

    def lose(messages, conn):
        note(messages, conn)
        if not killed:
            killed.append(conn.info.backend_pid)
            with connection.connect(url) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", killed)

    assert queue.group("s", "g").run(lose, wait=MOMENT) == 5
    assert len(done(url)) == 5


def test_workers_share_and_go(queue, url):
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
    wait_until(lambda: len(done(url)) == 80)
    groups[0].stop()
    wait_until(lambda: shares() == {"w2": 4})
    groups[1].stop()
    for thread in threads:
        thread.join(20)
    assert sorted(seq for seq, _, _ in done(url)) == sent
    assert {worker for _, _, worker in done(url)} == {"w1", "w2"}
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
    with connection.connect(url) as conn, pytest.raises(PgQueueError, match="of the client's own"):
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


WORKER = """
import sys, spark_pgqueue
from datetime import timedelta
from tests.unit.test_group import note
with spark_pgqueue.connect(sys.argv[1]) as queue:
    queue.group("s", "g").run(lambda m, c: note(m, c, sys.argv[2]), max_messages=5,
                              lease=timedelta(seconds=1), worker=sys.argv[2])
"""


@pytest.mark.longer
def test_workers_that_are_killed(queue, url):
    """kill -9, again and again, beside a producer: each message once, and in order by key."""

    def start(name):
        return subprocess.Popen([sys.executable, "-c", WORKER, url, name], cwd=Path.cwd())

    workers = [start(f"w{i}") for i in range(3)]
    sent = []
    try:
        for i in range(12):
            for _ in range(40):
                sent.append(queue.send("s", "x", key=f"k{len(sent) % 11}"))
                time.sleep(0.02)
            victim = workers.pop(0)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            workers.append(start(f"x{i}"))
        wait_until(lambda: len(done(url)) >= len(sent), 60)
    finally:
        for each in workers:
            each.kill()
            each.wait()
    got = done(url)
    assert sorted(seq for seq, _, _ in got) == sent
    for key in {key for _, key, _ in got}:
        mine = [seq for seq, k, _ in got if k == key]
        assert mine == sorted(mine)
