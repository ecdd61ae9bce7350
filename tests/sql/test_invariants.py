"""The nine invariants of the queue, one test or more for each, named after it."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, cost, internals
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")


@pytest.mark.all_versions
@for_each("ordering", ORDERINGS)
@pytest.mark.promise("guarantee: No loss", "guarantee: Versions")
def test_no_loss(conn: Conn, url: str, session: Session, ordering: str) -> None:
    """Published is untaken, in a run, dead or acknowledged; whoever dies, whenever."""
    consumer_id = consumer(conn, ordering=ordering)
    sent = send_keys(conn, *"abcabcabc")

    # in a claim that is never committed, because its session is killed
    dying = connection.connect(url)
    dying.execute("begin")
    assert receive(dying, 4)
    pid = dying.info.backend_pid
    conn.execute("select pg_terminate_backend(%s)", [pid])
    end = time.monotonic() + 10
    while one(conn, "select count(*) from pg_stat_activity where pid = %s", pid):
        assert time.monotonic() < end
        time.sleep(0.01)
    dying.close()
    checker.check(conn, {consumer_id: set()})

    # in the claim of a worker that died after its commit
    first = receive(session(), 4)
    clock.end_lease(conn, claim_of(first))
    checker.check(conn, {consumer_id: set()})

    # in an acknowledgement that is rolled back
    rows = receive(conn, 5)
    conn.execute("begin")
    assert value(conn, "ack", claim_of(rows)) == len(rows) > 0
    conn.execute("rollback")
    checker.check(conn, {consumer_id: set()})
    value(conn, "nack", claim_of(rows))
    assert sorted(acked(conn, "s", "c", 2)) == sent
    checker.check(conn, {consumer_id: set(sent)})


@pytest.mark.all_versions
@for_each("ordering", ORDERINGS)
@pytest.mark.promise(
    "guarantee: Exclusive claims",
    "feature: several workers of one consumer",
    "concepts: transitions of a message",
)
def test_exclusive(conn: Conn, url: str, ordering: str) -> None:
    """No message is in two claims, however many claim at once."""
    consumer_id = consumer(conn, ordering=ordering)
    sent = send_keys(conn, *(f"k{i % 50}" for i in range(300)))

    def work(size: int) -> list[int]:
        got: list[int] = []
        with connection.connect(url) as other:
            idle = 0
            while idle < 20:
                rows = call(other, "receive", "s", "c", size)
                if not rows:
                    idle += 1
                    time.sleep(0.005)
                    continue
                idle = 0
                got += seqs_of(rows)
                live = {claim.claim_id for claim in internals.claims(other) if claim.live}
                assert claim_of(rows) in live
                value(other, "ack", claim_of(rows))
        return got

    with ThreadPoolExecutor(4) as pool:
        got = [s for part in pool.map(work, [1, 3, 10, 50]) for s in part]
    assert sorted(got) == sent
    checker.check(conn, {consumer_id: set(sent)})


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("guarantee: Fencing")
def test_fenced(conn: Conn, ordering: str) -> None:
    """A token that is not live changes nothing and says so: acknowledged, taken over, never was."""
    for name in ("acknowledged", "taken over", "c"):
        consumer(conn, name, ordering)
    sent = send_keys(conn, "a", "b")
    acknowledged = claim_of(receive(conn, 2, "acknowledged"))
    value(conn, "ack", acknowledged)
    taken_over = claim_of(receive(conn, 2, "taken over"))
    clock.end_lease(conn, taken_over)
    assert seqs_of(receive(conn, 2, "taken over")) == sent
    value(conn, "nack", claim_of(receive(conn, 2)))
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    before = internals.bundles(conn)
    for stale in (acknowledged, taken_over, 10**9):
        for function in ("ack", "nack", "defer", "dead_letter", "extend"):
            assert value(conn, function, stale) == 0
            assert f"claim {stale} is not live" in notices.pop()
            assert value(conn, function, None) == 0
            assert "claim null is not live" in notices.pop()
            if function != "extend":
                assert value(conn, function, stale, sent) == 0
                assert f"claim {stale} is not live" in notices.pop()
    assert internals.bundles(conn) == before
    assert internals.dead_letters(conn) == []
    checker.check(conn)


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("guarantee: Fencing")
def test_fenced_to_its_own_messages(conn: Conn, ordering: str) -> None:
    """A live claim settles none of another's messages."""
    consumer(conn, "c", ordering)
    consumer(conn, "d", ordering)
    sent = send_keys(conn, "a", "b", "c")
    mine, other = (claim_of(call(conn, "receive", "s", name, 2)) for name in "cd")
    assert value(conn, "ack", mine, [sent[2], 10**9]) == 0
    assert value(conn, "nack", mine, [sent[2]]) == 0
    assert value(conn, "dead_letter", mine, [sent[2]]) == 0
    assert value(conn, "ack", mine, []) == 0
    assert value(conn, "extend", other) == 2
    assert value(conn, "ack", mine, sent) == 2
    checker.check(conn)


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("guarantee: Fixed claims")
def test_claim_contents_fixed(conn: Conn, session: Session, ordering: str) -> None:
    """Until its owner settles them, or the lease is over and another claimer needs the messages."""
    consumer(conn, ordering=ordering)
    sent = send_keys(conn, "a", "b", "c")
    claim = claim_of(receive(conn, 2))

    def held() -> list[int]:
        return sorted(internals.held_by(conn, claim))

    assert held() == sent[:2]
    other = session()
    receive(other, 5)  # of other keys
    assert held() == sent[:2]
    value(conn, "ack", claim, [sent[0]])
    assert held() == [sent[1]]
    clock.end_lease(conn, claim)
    call(conn, "maintain")
    assert held() == [sent[1]], "maintain() released a claim"
    # an owner that comes back first keeps it
    assert value(conn, "extend", claim) == 1
    assert receive(other, 5) == []
    assert held() == [sent[1]]
    clock.end_lease(conn, claim)
    rows = receive(other, 5)
    assert seqs_of(rows)[:1] == [sent[1]]
    assert rows[0].deliver_count == 2
    assert held() == []


@pytest.mark.promise("guarantee: Order (FIFO)")
def test_order_none(conn: Conn) -> None:
    """By priority, then arrival; what comes back keeps its place."""
    consumer(conn)
    low = [value(conn, "send", "s", "x", p_priority=-5) for _ in range(2)]
    normal = [value(conn, "send", "s", "x") for _ in range(2)]
    high = [value(conn, "send", "s", "x", p_priority=9) for _ in range(2)]
    rows = receive(conn, 3)
    assert seqs_of(rows) == [*high, normal[0]]
    value(conn, "nack", claim_of(rows), [high[1]])
    assert acked(conn, "s", "c", 1) == [high[1], normal[1], *low]


@pytest.mark.all_versions
@pytest.mark.promise("guarantee: Order (FIFO)", "feature: FIFO by key")
def test_order_key(conn: Conn, session: Session) -> None:
    """A message is not delivered while an earlier one of its key is unsettled elsewhere."""
    consumer(conn, ordering="key")
    a1, b1, a2, a3, free = send_keys(conn, "a", "b", "a", "a", None)
    first = receive(conn, 1)
    assert seqs_of(first) == [a1]
    second = receive(session(), 10)
    assert seqs_of(second) == [b1, free]
    assert receive(conn, 10) == []
    value(conn, "nack", claim_of(first), None, "1 hour")
    assert receive(conn, 10) == [], "overtook a delayed message of its key"
    clock.end_delays(conn)
    again = receive(conn, 10)
    assert seqs_of(again) == [a1]
    value(conn, "ack", claim_of(again))
    (a4,) = send_keys(conn, "a")
    third = receive(conn, 2)
    assert seqs_of(third) == [a2, a3]
    # a failed message takes the later ones of its key back with it
    assert value(conn, "nack", claim_of(third), [a3]) == 1
    assert receive(conn, 10) == [], "a2 may still fail"
    assert value(conn, "nack", claim_of(third), [a2]) == 1
    last = []
    while rows := receive(conn, 10):
        last += [(row.seq, row.deliver_count) for row in rows]
        value(conn, "ack", claim_of(rows))
    assert last == [(a2, 2), (a3, 2), (a4, 1)]
    checker.check(conn)


@pytest.mark.promise("guarantee: Order (FIFO)")
def test_order_stream(conn: Conn, session: Session) -> None:
    consumer(conn, ordering="stream")
    sent = send_keys(conn, "a", "b", None, "a", None)
    first = receive(conn, 2)
    assert seqs_of(first) == sent[:2]
    assert receive(session(), 2) == []
    value(conn, "ack", claim_of(first), [sent[1]])
    assert receive(conn, 2) == []
    value(conn, "nack", claim_of(first))
    checker.check(conn)
    assert acked(conn, "s", "c") == [sent[0], *sent[2:]]


@for_each("ordering", ["key", "stream"])
@pytest.mark.promise("guarantee: Overlapping transactions")
def test_order_of_late_commits(conn: Conn, opened: Session, ordering: str) -> None:
    """What was published late is delivered after, never at the same time elsewhere."""
    consumer(conn, ordering=ordering)
    late = opened()
    (first,) = send_keys(late, "a")
    (second,) = send_keys(conn, "a")
    rows = receive(conn, 10)
    assert seqs_of(rows) == [second]
    late.execute("commit")
    assert receive(conn, 10) == []
    value(conn, "nack", claim_of(rows))
    assert acked(conn, "s", "c") == [second, first]


@pytest.mark.promise("guarantee: Flat cost")
def test_index_probes_only(conn: Conn, stream: int) -> None:
    """A claim and its settlement read as much at 100,000 messages as at 1,000. See test_plans."""
    for ordering in ORDERINGS:
        consumer(conn, ordering, ordering)
    internals.publish_together(conn, stream, 1000, "'k' || i")
    few = {name: cost.claim_cost(conn, name, 10) for name in ORDERINGS}
    internals.publish_together(conn, stream, 100_000, "'k' || i")
    for name in ORDERINGS:
        cost.assert_flat(name, few[name], cost.claim_cost(conn, name, 10))


@pytest.mark.promise("guarantee: Atomic publication", "concepts: transitions of a message")
def test_atomic_publication(conn: Conn, session: Session) -> None:
    """In the publisher's transaction: with its other writes, or not at all."""
    consumer(conn)
    conn.execute("create table mine (n int)")
    other = session()
    for end, expected in (("rollback", []), ("commit", [1])):
        other.execute("begin")
        other.execute("insert into mine values (1)")
        sent = send_keys(other, "a", "b")
        value(other, "send", "s", "x")
        assert receive(conn, 10) == []
        assert one(conn, "select count(*) from pgqueue.message_states where state = 'new'") == 0
        other.execute(end.encode())
        got = acked(conn, "s", "c")
        assert len(got) == (3 if expected else 0)
        assert got[:2] == (sent if expected else [])
        assert [row[0] for row in conn.execute("select n from mine").fetchall()] == expected


@pytest.mark.all_versions
def test_atomic_publication_of_a_batch(conn: Conn, url: str, stream: int) -> None:
    """A staged batch appears whole and once, however often and by how many it is committed."""
    consumer(conn)
    staged, seqs = [], []
    for _ in range(3):
        with conn.transaction():
            block = internals.insert_messages(conn, stream, 5)
            seqs += block
            staged.append(value(conn, "stage", "sink", 7, stream,
                                f"{{[{block[0]},{block[-1]}]}}"))  # fmt: skip
    assert receive(conn, 100) == [], "staged is not published"
    with raises("PQ008"):
        value(conn, "publish_staged", "sink", 7, stream, [*staged, 999], 15)
    assert receive(conn, 100) == []
    assert internals.staged_chunks(conn) == sorted(staged)

    barrier = threading.Barrier(4)

    def commit(_: int) -> bool:
        with connection.connect(url) as other:
            barrier.wait()
            return value(other, "publish_staged", "sink", 7, stream, staged, 15)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(commit, range(4))) == [False, False, False, True]
    assert acked(conn, "s", "c") == seqs
    assert value(conn, "publish_staged", "sink", 7, stream, staged, 15) is False
    assert acked(conn, "s", "c") == []


@pytest.mark.all_versions
@for_each("ordering", ORDERINGS)
@pytest.mark.promise("guarantee: Replayable offsets")
def test_replayable(conn: Conn, session: Session, opened: Session, ordering: str) -> None:
    """The same offsets give the same messages, in any session, after any crash."""
    consumer_id = consumer(conn, ordering=ordering)
    reader = uuid.uuid4()
    send_keys(conn, "a", "b", "a", "c")

    def claim(conn: Conn, start: tuple[int, int], n: int | None = None) -> tuple:
        (row,) = call(conn, "reader_claim", reader, consumer_id, *start, n)
        return row.claim_id, row.messages

    def batch(conn: Conn, start: int, end: int) -> list[tuple[int, int]]:
        (row,) = call(conn, "reader_resume", reader, consumer_id, start, end)
        plan = call(conn, "reader_plan", reader, start, end)
        messages = [(s, r.deliver_count) for r in plan for s in range(r.lo, r.hi)]
        assert row.planned == len(messages)
        assert (row.taken_over, row.gone) == (0, 0)
        return messages

    # a crash in the claim's transaction leaves nothing, one after it leaves the batch
    dying = opened()
    claim(dying, (0, 0), 3)
    dying.execute("rollback")
    first = claim(conn, (0, 0), 3)
    send_keys(conn, "a", "d")
    assert claim(session(), (0, 0), 100) == first
    contents = batch(conn, 0, first[0])
    assert len(contents) == 3
    for _ in range(2):
        assert claim(session(), (0, 0)) == first
        assert batch(session(), 0, first[0]) == contents

    # the lease ends, and nobody wants the messages
    clock.end_lease(conn, first[0])
    assert batch(session(), 0, first[0]) == contents

    # the next batch acknowledges it, and is as fixed
    second = claim(conn, first)
    assert claim(session(), first) == second
    assert [s for s, _ in batch(conn, first[0], second[0])] == [4, 5, 6]
    assert second[1] == 6
    with raises("PQ010"):
        claim(conn, (0, 0))
    checker.check(conn, {consumer_id: {s for s, _ in contents}})


@for_each("isolation", ["read committed", "repeatable read", "serializable"])
@pytest.mark.promise("guarantee: Independent producers")
def test_no_producer_blocks_another(
    conn: Conn, session: Session, stream: int, isolation: str
) -> None:
    """Open transactions that sent, staged, claimed or acknowledged hold up no send."""
    for ordering in ORDERINGS:
        consumer(conn, ordering, ordering)
    consumer(conn, "free", "key")
    send_keys(conn, "a", "b")
    sender, reader, acker, new = session(), session(), session(), session()
    sender.execute(f"begin transaction isolation level {isolation}")  # type: ignore[arg-type]
    send_keys(sender, "a", "b")
    value(sender, "send", "s", "x", p_key="a", p_consumers=["key"])
    (written,) = internals.insert_messages(sender, stream, 1)
    value(sender, "stage", "sink", 1, stream, f"{{[{written},{written}]}}")
    claim = claim_of(call(acker, "receive", "s", "none", 1))
    acker.execute("begin")
    value(acker, "ack", claim)
    reader.execute("begin")
    for ordering in ORDERINGS:
        assert call(reader, "receive", "s", ordering, 1)
    new.execute("begin")
    consumer(new, "new")
    conn.execute("set lock_timeout = '2 s'")
    conn.execute(f"begin transaction isolation level {isolation}")  # type: ignore[arg-type]
    assert len(send_keys(conn, "a", "b", None)) == 3
    assert value(conn, "send", "s", "x", p_key="a", p_consumers=["key", "none"])
    conn.execute("commit")
    # nor is a reader held up by a producer
    assert call(conn, "receive", "s", "free", 10)
    for other in (sender, reader, acker, new):
        other.execute("rollback")


def test_no_producer_blocks_the_making_of_streams(conn: Conn, opened: Session) -> None:
    sender = opened()
    send_keys(sender, "a")
    conn.execute("set lock_timeout = '2 s'")
    value(conn, "create_stream", "another")
    assert value(conn, "send", "another", "x") == 1
    maker = opened()
    value(maker, "create_stream", "third")
    assert send_keys(conn, "b")
    maker.execute("rollback")
