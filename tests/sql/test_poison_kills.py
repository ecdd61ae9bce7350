"""Real workers, killed (-9) by a message: it ends alone in the dead letters.

`test_poison` has the same with leases that are made to end.
"""

from math import ceil, log2

import pytest

from tests.processes import Child
from tests.sql import internals
from tests.sql.queue import ORDERINGS, Conn, consumer, one, seconds, states

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

MANY = [
    *((ordering, how) for ordering in ORDERINGS for how in ("plain", "batches")),
    ("key", "singly"),
]

# Whoever dies is replaced, until one ends by itself. A fork is a process like any other, and quick.
SUPERVISOR = """
import os, sys, time
from datetime import timedelta
import psycopg
from spark_pgqueue import Consumer

url, how, poison, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
conn = None  # of the worker's own process

def note(seqs):
    conn.execute("insert into done select unnest(%s::bigint[])", [seqs])

def work(seqs):
    time.sleep(pause)  # so that others are at work
    if poison in seqs:
        os.kill(os.getpid(), 9)

def plain():
    left = "select exists (select from pgqueue.message_states where state <> 'dead')"
    while conn.execute(left).fetchone()[0]:
        rows = conn.execute("select seq, claim_id from pgqueue.receive('s', 'c', 10000)").fetchall()
        if not rows:
            time.sleep(0.02)
            continue
        work([seq for seq, _ in rows])
        with conn.transaction():
            note([seq for seq, _ in rows])
            conn.execute("select pgqueue.ack(%s)", [rows[0][1]])

def batches(messages):
    work([message.seq for message in messages])
    note([message.seq for message in messages])

def singly(message):
    work([message.seq])
    note([message.seq])

deaths = 0
while True:
    child = os.fork()
    if child == 0:
        conn = psycopg.connect(url, autocommit=True)
        worker = Consumer(url, "s", "c")
        wait = timedelta(seconds=1)
        if how == "plain":
            plain()
        elif how == "batches":
            worker.run(batches, batch=10_000, prefetch=10_000, wait=wait)
        else:
            worker.run(singly, concurrency=4, wait=wait)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, status
    deaths += 1
print("deaths", deaths, flush=True)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ordering", "how", "n", "most", "pause"),
    [
        ("none", "singly", 12, 2, 0.1),
        *(pytest.param(*each, 10_000, 3, 0, marks=pytest.mark.longer) for each in MANY),
    ],
)
def test_one_message_among_many_that_kills_its_worker_ends_alone(
    conn: Conn, url: str, ordering: str, how: str, n: int, most: int, pause: float
) -> None:
    """Some log2(n) workers die of it, and all other messages are worked on, also those that the
    worker had claimed beside it."""
    consumer(conn, ordering=ordering, max_deliver_count=most, visibility_timeout=seconds(0.3))
    conn.execute("create table done (seq bigint)")
    conn.execute(
        "select count(*) from pgqueue.send_batch('s', array_fill('x'::text, %s),"
        " (select array_agg('k' || i %% 900) from generate_series(1, %s) i))",
        [[n], n],
    )
    poison = n * 2 // 3
    with Child(SUPERVISOR, url, how, str(poison), str(pause)) as child:
        assert child.wait(240) == 0, child.output[-3000:]
        deaths = int(child.output.split()[-1])
    assert most <= deaths <= ceil(log2(n)) + 2
    assert states(conn) == {poison: "dead"}
    (dead,) = internals.dead_letters(conn)
    assert (dead.reason, dead.message_count) == ("max deliveries", 1)
    assert dead.note["error"] == "the visibility timeout expired"
    assert one(conn, "select count(distinct seq) from done where seq <> %s", poison) == n - 1
    assert one(conn, "select count(*) from done where seq = %s", poison) == 0
    if how == "plain":
        assert one(conn, "select count(*) from done") == n - 1, "each once"
