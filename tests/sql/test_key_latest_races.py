"""Latest wins, beside producers that race and workers that are killed (SIGKILL).

A worker writes down what it gets in the transaction in which it claims it, together with what was
committed before: so the database tells in which order messages were delivered, and what the newest
ones were. The judge goes by that, by what was sent, and by the history.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker
from tests.sql.queue import *

SPAWN = mp.get_context("spawn")
KEYS = "abc"
LONG = "1 hour"  # the visibility timeout of a claim that is settled in any case
TABLES = """
create table sent (seq bigint, key text);
create table delivered (no bigserial, seq bigint, key text, newest bigint);
create table settled (seq bigint, how text);
create table over ()
"""


def produce(url: str, seed: int, count: int) -> None:
    """Send messages of few keys, also several in a transaction, committed late or never."""
    rng = random.Random(seed)
    conn = connection.connect(url)
    for _ in range(count):
        with conn.transaction(force_rollback=rng.random() < 0.2):
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                keys = rng.choices(KEYS, k=rng.choice([1, 1, 5]))
                due = now(conn) + seconds(0.03) if rng.random() < 0.25 else None
                seqs = send_all(conn, ["x"] * len(keys), p_keys=keys, p_deliver_at=due)
                sent = list(zip(seqs, keys, strict=True))
                conn.cursor().executemany("insert into sent values (%s, %s)", sent)
                time.sleep(rng.choice([0, 0, 0.002, 0.02]))


def work(url: str, seed: int) -> None:
    """Claim, and settle in every way, or die with the claim."""
    rng = random.Random(seed)
    conn = connection.connect(url)
    while True:
        dies = rng.random() < 0.1
        is_over = one(conn, "select exists (select from over)")
        with conn.transaction():
            newest = dict(conn.execute("select key, max(seq) from sent group by key").fetchall())
            found = call(
                conn, "receive", "s", "c", rng.choice([1, 1, 2, 10]), "0.2 s" if dies else LONG
            )
            for m in found:
                conn.execute(
                    "insert into delivered (seq, key, newest) values (%s, %s, %s)",
                    [m.seq, m.key, newest.get(m.key)],
                )
        if not found:
            if is_over and value(conn, "consumer_backlog", 1) == 0:
                return
            time.sleep(0.005)
            continue
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(rng.choice([0, 0, 0.01]))
        claim, seqs = claim_of(found), seqs_of(found)
        how = rng.choice(["ack", "ack", "ack", "nack", "defer", "dead_letter"])
        with conn.transaction():
            assert value(conn, "extend", claim) == len(seqs), "a claimed message was replaced"
            if how == "ack" and rng.random() < 0.5:
                assert value(conn, "ack", claim, seqs[:1]) == 1
                value(conn, "nack", claim)
                seqs = seqs[:1]
            elif how == "ack":
                assert value(conn, "ack", claim) == len(seqs)
            else:
                value(conn, how, claim)
            if how in ("ack", "dead_letter"):
                conn.cursor().executemany(
                    "insert into settled values (%s, %s)", [(seq, how) for seq in seqs]
                )


def judge(conn: Conn) -> None:
    """Compare what was delivered and how it ended with what was sent."""
    sent = dict(conn.execute("select seq, key from sent").fetchall())
    last: dict[Any, int] = dict.fromkeys(KEYS, 0)
    deliveries: Counter[int] = Counter()
    for row in rows(conn, "select * from delivered order by no"):
        assert sent[row.seq] == row.key, f"it was rolled back: {row}"
        assert row.seq >= (row.newest or 0), f"a newer message was committed before: {row}"
        assert row.seq >= last[row.key], f"after {last[row.key]}: {row}"
        last[row.key] = row.seq
        deliveries[row.seq] += 1
    assert last == {key: max(s for s, k in sent.items() if k == key) for key in KEYS}
    how = dict(conn.execute("select seq, how from settled").fetchall())
    for seq, key in sent.items():
        (end,) = call(conn, "outcome", "s", "c", seq)
        if seq in how:
            assert end.state == {"ack": "done", "dead_letter": "dead"}[how[seq]], f"{seq}: {end}"
        else:
            by = end.result["replaced_by"]
            assert (end.state, sent[by]) == ("replaced", key), f"{seq}: {end}"
            assert by > seq, f"{seq}: {end}"
            assert end.deliver_count <= deliveries[seq], f"{seq}: {end}"  # defer counts none
    replaced = sum(seq not in how for seq in sent)
    assert 0 < replaced < len(sent), "nothing was tried"


@pytest.mark.longer
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_of_racing_producers_the_newest_is_delivered_and_nothing_older(
    conn: Conn, url: str, ordering: str
) -> None:
    value(conn, "create_stream", "s")
    settings = {"per_key_latest": True, "keep_history": "1 day"}
    value(conn, "create_consumer", "s", "c", "latest", ordering, p_settings=Jsonb(settings))
    conn.execute(TABLES)
    producers = [SPAWN.Process(target=produce, args=(url, i, 150)) for i in range(3)]
    workers = [SPAWN.Process(target=work, args=(url, 10 + i)) for i in range(2)]
    for process in (*producers, *workers):
        process.start()
    deaths = 0
    while workers:
        time.sleep(0.05)
        checker.check(conn)
        if not any(p.is_alive() for p in producers):
            conn.execute("insert into over select where not exists (select from over)")
        for process in [w for w in workers if not w.is_alive()]:
            workers.remove(process)
            if process.exitcode == -signal.SIGKILL:
                deaths += 1
                workers.append(SPAWN.Process(target=work, args=(url, 100 + deaths)))
                workers[-1].start()
            else:
                assert process.exitcode == 0, "a worker's claim lost a message"
    assert [p.exitcode for p in producers] == [0, 0, 0]
    judge(conn)
