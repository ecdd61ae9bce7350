"""History: what was acknowledged, by whom and with what result; what became of a message."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import clock
from tests.sql.cases import for_each
from tests.sql.checker import numbers
from tests.sql.cost import cost
from tests.sql.internals import rows
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

KEEP = json.dumps({"keep_history": "1 day"})
NOTIFY = json.dumps({"notify_done": True})


def keeper(conn: Conn, name: str = "c", settings: str = KEEP, **options: Any) -> int:
    """A consumer that keeps its history."""
    return consumer(conn, name, **json.loads(settings), **options)


def history(conn: Conn, name: str = "c") -> list[Any]:
    """What is kept of a consumer, in the order of its end."""
    query = "select * from pgqueue.message_history where consumer = %s order by done_at"
    return rows(conn, query, name)


def outcome(conn: Conn, seq: int, name: str = "c") -> Any:
    """What became of a message of the stream s."""
    (row,) = call(conn, "outcome", "s", name, seq)
    return row


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("feature: results, and who did it")
def test_an_acknowledgement_is_kept_with_its_result(conn: Conn, ordering: str) -> None:
    """Of a whole claim, of some of its messages, and of one that the next claim makes."""
    conn.execute("set application_name = 'billing 7'")
    keeper(conn, ordering=ordering)
    sent = send_all(conn, ["x"] * 5, p_keys=["k"] * 5)
    before = now(conn)
    claim = claim_of(receive(conn))
    assert value(conn, "ack", claim, sent[1:2], '{"total": 12}') == 1
    assert value(conn, "ack", claim, None, '"the rest"') == 4
    one_more = send(conn)
    claims = [claim, claim, claim_of(receive(conn))]
    assert receive(conn, p_ack=claims[2]) == []
    kept = history(conn)
    found = [sorted(numbers(row.seqs)) for row in kept]
    assert found == [[sent[1]], [sent[0], *sent[2:]], [one_more]]
    assert [row.result for row in kept] == [{"total": 12}, "the rest", None]
    assert [row.claim_id for row in kept] == claims
    assert all(row.message_count == len(numbers(row.seqs)) for row in kept)
    assert {(row.owner, row.deliver_count) for row in kept} == {("billing 7", 1)}
    assert before < kept[0].claimed_at < kept[0].done_at < kept[1].done_at <= now(conn)


def test_what_a_spark_query_is_done_with_is_kept(conn: Conn, reader: Reader) -> None:
    alter(conn, keep_history="1 day")
    sent = send_all(conn, ["x"] * 3)
    reader.move(reader.ask())
    assert history(conn) == []
    reader.ask()
    (kept,) = history(conn)
    assert sorted(numbers(kept.seqs)) == sent


def test_the_setting_counts_from_the_next_claim_on(conn: Conn) -> None:
    """And a history that is not wanted any more goes."""
    consumer(conn)
    send_all(conn, ["x"] * 3)
    before = claim_of(receive(conn, 1))
    alter(conn, keep_history="1 day")
    after = claim_of(receive(conn, 1))
    value(conn, "ack", before)
    value(conn, "ack", after)
    assert [row.claim_id for row in history(conn)] == [after]
    alter(conn, keep_history=None)
    value(conn, "ack", claim_of(receive(conn, 1)), None, "1")
    assert len(history(conn)) == 1
    assert maintain(conn)["old history"] == 1
    assert history(conn) == []


def test_history_is_kept_for_as_long_as_it_is_told(conn: Conn) -> None:
    keeper(conn)
    keeper(conn, "other", json.dumps({"keep_history": "2 days"}))
    for _ in range(2):
        send(conn)
        acked(conn, "s", "c")
        acked(conn, "s", "other")
        clock.pass_time(conn, timedelta(hours=23))
    assert maintain(conn)["old history"] == 1
    assert (len(history(conn)), len(history(conn, "other"))) == (1, 2)
    value(conn, "drop_consumer", "s", "other")
    assert one(conn, "select count(*) from pgqueue.completed_messages") == 1


def test_only_what_its_owner_acknowledged_is_kept(conn: Conn) -> None:
    """Nothing of a stale claim, of what was returned, or of numbers that the claim has not."""
    keeper(conn)
    sent = send_all(conn, ["x"] * 3)
    stale = claim_of(receive(conn))
    clock.end_leases(conn)
    claim = claim_of(receive(conn))
    assert value(conn, "ack", stale, None, "1") == 0
    assert value(conn, "ack", claim, [99], "2") == 0
    value(conn, "nack", claim, sent[:1])
    value(conn, "dead_letter", claim, sent[1:2])
    value(conn, "ack", claim, sent, "3")
    (kept,) = history(conn)
    assert (sorted(numbers(kept.seqs)), kept.deliver_count, kept.result) == (sent[2:], 2, 3)


def test_a_consumer_without_history_pays_nothing_for_it(conn: Conn) -> None:
    """Its acknowledgements do not even look whether there is one to be kept."""
    consumer(conn)
    keeper(conn, "keeper")
    send_all(conn, ["x"] * 20)
    costs: dict[str, list[int]] = {"c": [], "keeper": []}
    for name in ["c", "keeper"] * 8:
        claim = claim_of(receive(conn, 1, name))
        costs[name].append(cost(conn, "select pgqueue.ack(%s)", claim))
    assert min(costs["c"]) < min(costs["keeper"])
    plain = one(conn, "select prosrc from pg_proc where oid = 'pgqueue.ack'::regproc")
    assert "consumers" not in plain


# What became of it


@for_each("settings", [KEEP, "{}"])
def test_the_outcome_of_a_message_is_told_at_any_time(conn: Conn, settings: str) -> None:
    keeper(conn, settings=settings)
    done, dead, left = send_all(conn, ["x"] * 3)
    assert outcome(conn, done).state == "new"
    conn.execute("set application_name = 'w'")
    claim = claim_of(receive(conn, 2))
    held = outcome(conn, done)
    assert (held.state, held.owner, held.deliver_count, held.ended_at) == ("claimed", "w", 1, None)
    assert outcome(conn, left).state == "ready"
    value(conn, "ack", claim, [done], '{"a": 1}')
    value(conn, "dead_letter", claim, [dead], "bad", '{"b": 2}')
    told = outcome(conn, done)
    assert told.state == "done"
    if settings == KEEP:
        assert (told.result, told.owner, told.deliver_count) == ({"a": 1}, "w", 1)
        assert told.claimed_at < told.ended_at <= now(conn)
    else:
        assert (told.result, told.ended_at) == (None, None)
    told = outcome(conn, dead)
    assert (told.state, told.reason, told.result, told.owner) == ("dead", "bad", {"b": 2}, "w")
    assert outcome(conn, 99).state == "unknown"


def test_the_error_of_a_message_that_failed_is_told(conn: Conn) -> None:
    keeper(conn)
    seq = send(conn)
    value(conn, "nack", claim_of(receive(conn)), [seq], seconds(60), "no such user")
    told = outcome(conn, seq)
    assert (told.state, told.error, told.deliver_count) == ("delayed", "no such user", 1)
    assert seconds(59) < told.due_at - now(conn) <= seconds(60)


def test_who_listens_is_notified_of_every_end(conn: Conn, session: Session) -> None:
    """And of no other consumer's."""
    keeper(conn, settings=NOTIFY, max_deliver_count=1)
    consumer(conn, "other")
    other = session()
    channel = value(other, "listen_done", "s", "c", other.info.backend_pid)
    assert channel
    assert value(other, "listen_done", "s", "c", other.info.backend_pid + 1) is None
    assert value(other, "listen_done", "s", "other") is None
    ends: dict[str, Callable[[int, int], object]] = {
        "ack": lambda claim, seq: value(conn, "ack", claim),
        "ack some": lambda claim, seq: value(conn, "ack", claim, [seq]),
        "next claim": lambda claim, seq: receive(conn, p_ack=claim),
        "dead_letter": lambda claim, seq: value(conn, "dead_letter", claim),
        "expired": lambda claim, seq: (clock.end_leases(conn), receive(conn)),
    }
    for end, make in ends.items():
        seq = send(conn)
        acked(conn, "s", "other")
        claim = claim_of(receive(conn))
        assert not list(other.notifies(timeout=0.05, stop_after=1))
        make(claim, seq)
        assert [n.channel for n in other.notifies(timeout=10, stop_after=1)] == [channel], end
        assert outcome(conn, seq).state in ("done", "dead")
    assert history(conn) == []


@for_each("ordering", ["none", "key"])
def test_each_end_is_kept_once_whoever_dies(
    conn: Conn, session: Session, url: str, ordering: str
) -> None:
    """Workers whose leases are too short, backends that are killed at it, and who cancels."""
    keeper(conn, ordering=ordering, visibility_timeout=seconds(0.05))
    sent = send_keys(conn, *(f"k{i % 20}" for i in range(600)))
    done: Counter[int] = Counter()
    pids: list[int] = []
    over = threading.Event()

    def work() -> None:
        chance = random.Random(threading.get_ident())
        while not over.is_set():
            lost = (psycopg.OperationalError, psycopg.InterfaceError)
            with contextlib.suppress(*lost), connection.connect(url) as worker:
                pids.append(worker.info.backend_pid)
                while not over.is_set():
                    found = receive(worker, 5)
                    time.sleep(0.06 if chance.random() < 0.1 else 0)
                    if found and chance.random() < 0.2:
                        value(worker, "nack", claim_of(found), [found[-1].seq], seconds(0))
                    for m in found:
                        if value(worker, "ack", m.claim_id, [m.seq], json.dumps(m.seq)):
                            done[m.seq] += 1

    def cancel(own: Conn) -> int:
        count = 0
        while not over.is_set():
            sent.extend(send_keys(own, "k1", "k2"))  # the last one is new, or was just taken
            count += value(own, "cancel", "s", "c", [*random.sample(sent, 4), sent[-1]])
            time.sleep(0.02)
        return count

    with ThreadPoolExecutor(5) as pool:
        workers = [pool.submit(work) for _ in range(4)]
        cancelling = pool.submit(cancel, session())
        end = time.monotonic() + 20
        while len(done) < 400 and time.monotonic() < end:
            time.sleep(0.05)
            conn.execute("select pg_terminate_backend(%s)", [random.choice(pids or [0])])
        over.set()
        for worker in workers:
            worker.result(30)
    clock.end_leases(conn)
    acked(conn, "s", "c")
    kept = history(conn)
    assert Counter(seq for row in kept for seq in numbers(row.seqs)) == Counter(sent)
    assert all(row.result in (None, *numbers(row.seqs)) for row in kept)
    assert max(done.values()) == 1
    assert cancelling.result() == sum(row.message_count for row in kept if row.claim_id is None) > 0
