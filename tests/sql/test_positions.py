"""Where consumers begin, are moved to, and begin again: exact whatever runs meanwhile."""

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker, internals
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("allowed_afterwards")


def seek(conn: Conn, to: Any, name: str = "c") -> int:
    return value(conn, "seek", "s", name, str(to))


def replay(conn: Conn, start: Any, end: Any = "latest", name: str = "c") -> int:
    return value(conn, "replay", "s", name, str(start), str(end))


# Positions


@pytest.mark.all_versions
@pytest.mark.parametrize("moved", [False, True], ids=["created", "moved"])
def test_a_number_is_a_position_also_inside_a_publication(conn: Conn, moved: bool) -> None:
    sent = [send(conn), *send_all(conn, ["x"] * 4), send(conn)]
    dead_publication(conn)
    sent += [send(conn)]
    if moved:
        for i in range(len(sent)):
            consumer(conn, f"at {i}")
    for i, seq in enumerate(sent):
        if moved:
            assert seek(conn, f"seq {seq}", f"at {i}") == i
        else:
            consumer(conn, f"at {i}", p_start=f"seq {seq}")
    consumer(conn, "next", p_start=f"seq {sent[-1] + 1}")
    after = [send(conn)]
    for i in range(len(sent)):
        checker.check(conn)
        assert stats(conn, f"at {i}").new == len(sent) - i + 1
        assert set(states(conn, f"at {i}")) == {*sent[i:], *after}
        assert acked(conn, "s", f"at {i}", 2) == sent[i:] + after
    assert acked(conn, "s", "next") == after


def test_a_number_is_a_position_whatever_the_order_of_publication(
    conn: Conn, session: Session, stream: int
) -> None:
    """What a sink wrote before, or an open transaction sends, and what others sent meanwhile."""
    early = session()
    early.execute("begin")
    running = send(early)
    block = stage(conn, stream, 3)
    singles = [send(conn), send(conn)]
    publish(conn, stream, [block], 3)
    last = send(conn)
    everything = [*range(singles[0] - 3, singles[0]), *singles, last]
    for seq in everything:
        consumer(conn, f"at {seq}", p_start=f"seq {seq}")
    early.execute("commit")
    for seq in everything:
        got = acked(conn, "s", f"at {seq}")
        assert sorted(got) == [running, *(s for s in everything if s >= seq)]


def test_a_number_is_a_position_beside_many_that_were_published_late(
    conn: Conn, stream: int
) -> None:
    """A hundred batches that were written before: they look like the place, and are not."""
    blocks = [stage(conn, stream, 2, batch) for batch in range(100)]
    singles = [send(conn) for _ in range(300)]
    for batch, block in enumerate(blocks):
        publish(conn, stream, [block], 2, batch)
    last = send(conn)
    for i in (0, 150, 299):
        consumer(conn, f"at {i}", p_start=f"seq {singles[i]}")
        assert acked(conn, "s", f"at {i}") == [*singles[i:], last]
    consumer(conn, "late", p_start=f"seq {singles[0] - 3}")
    assert acked(conn, "s", "late") == [*range(singles[0] - 3, singles[0]), *singles, last]


def test_a_time_is_a_position_and_the_future_is_the_end(conn: Conn) -> None:
    old = [send(conn) for _ in range(5)]
    since = now(conn)
    recent = [send(conn) for _ in range(3)]
    consumer(conn, "since", p_start=str(since))
    ends, begins = ["2999-01-01", "infinity", "latest"], ["1999-01-01", "-infinity", "earliest"]
    for start in ends + begins:
        consumer(conn, start, p_start=start)
    value(conn, "create_consumer", "s", "default")
    new = [send(conn)]
    assert acked(conn, "s", "since") == recent + new
    for end in [*ends, "default"]:
        assert acked(conn, "s", end) == new, end
    for begin in begins:
        assert acked(conn, "s", begin) == old + recent + new, begin


def test_a_time_is_exact_where_publications_overtook_each_other(conn: Conn) -> None:
    """A sink takes the id of a large batch a moment before it notes the time."""
    sent = [send(conn) for _ in range(6)]
    times = [0, 5, 1, 2, 6, 4]
    internals.set_published_at(conn, times)
    for at in range(8):
        since = now(conn).replace(year=2001, month=1, day=1, hour=0, minute=0, second=at)
        since = since.replace(microsecond=0)
        name = f"at {at}"
        consumer(conn, name, p_start=str(since))
        after = [seq for seq, time_ in zip(sent, times, strict=True) if time_ >= at]
        assert sorted(acked(conn, "s", name)) == after


@pytest.mark.parametrize("known", ["to nobody", "to another consumer", "to maintain"])
def test_the_end_is_told_beside_a_transaction_that_stays_open(
    conn: Conn, session: Session, known: str
) -> None:
    """Nobody knows what it holds but from what is not visible; and a prepared one stays so."""

    def look() -> None:
        if known == "to another consumer":
            acked(conn, "s", "other")
        elif known == "to maintain":
            call(conn, "maintain")

    send(conn)
    if known == "to another consumer":
        consumer(conn, "other")
    look()
    early, prepared = session(), session()
    early.execute("begin")
    held = [send_key(early)]
    value(conn, "create_stream", "quiet", p_settings='{"notify": false}')
    dead_publication(conn)
    seen = [send(conn)]
    look()
    seen.append(send(conn))
    look()
    prepared.execute("begin")
    held.append(value(prepared, "send", "s", "x"))
    prepared.execute("prepare transaction 'p'")
    seen.append(send(conn))
    look()
    consumer(conn, p_start="latest")
    assert acked(conn, "s", "c") == []
    early.execute("commit")
    prepared.execute("commit prepared 'p'")
    assert acked(conn, "s", "c") == held


def test_a_position_costs_the_same_whatever_the_history(
    conn: Conn, stream: int, session: Session
) -> None:
    """Also where no consumer knows the past, if maintain() was called now and then.

    Alone, and beside a producer.
    """
    producer = session()

    def blocks(position: str) -> float:
        query = f"select pgqueue.create_consumer('s', md5(random()::text), '{position}')"
        costs = []
        for _ in range(3):
            with conn.transaction(force_rollback=True):
                costs.append(cost(conn, query))
        return min(costs)

    costs = []
    for size in (30_000, 70_000):
        internals.publish_singly(conn, stream, size)
        call(conn, "maintain")
        since = one(conn, "select clock_timestamp() - interval '100 ms'")
        positions = ["earliest", "latest", f"{since}", f"seq {size // 2}"]
        alone = [blocks(position) for position in positions]
        with producer.transaction(force_rollback=True):
            send(producer)
            costs.append(alone + [blocks(position) for position in positions])
    value(conn, "drop_stream", "s")  # the checker would read all of it
    call(conn, "maintain")
    for few, many in zip(*costs, strict=True):
        assert many <= few * 1.3 + 60, f"{few} blocks after 30,000, {many} after 100,000"


# Seek


@pytest.mark.promise("concepts: transitions of a message")
def test_a_moved_consumer_is_as_if_it_were_created_there(conn: Conn) -> None:
    """Runs in every state and claims are gone, whoever holds them; dead letters stay dead."""
    for name in ORDERINGS:
        consumer(conn, name, name)
    sent = send_keys(conn, "a", "b", "a", None, "c", "b")
    left, dead = len(sent) - 1, {}
    for name in ORDERINGS:
        held = receive(conn, 2, name)
        dead[name] = held[0].seq
        value(conn, "dead_letter", claim_of(held), [held[0].seq])
        value(conn, "nack", claim_of(held), None, "1 hour")
        mine = receive(conn, 1, name)
        assert seek(conn, "earliest", name) == left
        assert value(conn, "ack", claim_of(mine) if mine else 1) == 0
        checker.check(conn)
        assert (stats(conn, name).backlog, stats(conn, name).dead) == (left, 1)
        assert sorted(acked(conn, "s", name)) == sorted(set(sent) - {dead[name]})
        assert seek(conn, "latest", name) == 0
    later = send_keys(conn, "a", "a")
    for name in ORDERINGS:
        assert seek(conn, "latest", name) == 2
        assert acked(conn, "s", name) == []
        assert seek(conn, f"seq {later[1]}", name) == 0
        assert acked(conn, "s", name) == [later[1]]


@pytest.mark.small_limits
def test_a_consumer_goes_back_and_forth_over_gaps(conn: Conn, session: Session) -> None:
    for name in ORDERINGS:
        consumer(conn, name, name)
    early = session()
    early.execute("begin")
    held = send_key(early)
    sent: list[int] = []
    for i in range(6):
        sent += send_keys(conn, "k", f"{i}")
        dead_publication(conn)
    for name in ORDERINGS:
        assert sorted(everything(conn, name)) == sent
        for i in (8, 3, 5, 0):
            seek(conn, f"seq {sent[i]}", name)
            checker.check(conn)
            assert sorted(everything(conn, name)) == sent[i:]
    early.execute("commit")
    for name in ORDERINGS:
        assert everything(conn, name) == [held]
        assert everything(conn, name) == []


def everything(conn: Conn, name: str = "c") -> list[int]:
    """All that can be had; with small limits, a claim may find nothing though there is more."""
    got: list[int] = []
    for _ in range(6):
        got += acked(conn, "s", name)
    return got


def test_a_move_counts_what_is_forgotten(conn: Conn) -> None:
    consumer(conn, notify_done=True)  # takes all that is new
    consumer(conn, "other")
    sent = [send(conn) for _ in range(4)]
    value(conn, "send", "s", "x", p_consumers=["other"])
    receive(conn, 1)
    send(conn)
    assert seek(conn, f"seq {sent[2]}") == 4
    assert seek(conn, "latest") == 3
    assert seek(conn, "latest") == 0


def test_a_spark_query_loses_its_batch_when_its_consumer_is_moved(reader: Reader) -> None:
    """Tasks that read find so, a replay has nothing, and the query goes on from there."""
    conn = reader.conn
    sent = send_all(conn, ["x"] * 6)
    end = reader.ask(4)
    assert reader.resume(end).planned == 4
    before = reader.lost(end)
    seek(conn, f"seq {sent[5]}")
    assert reader.lost(end) == before + 4
    again = reader.resume(end)
    assert (again.planned, again.taken_over, again.gone) == (0, 4, 0)
    assert reader.plan(end) == []
    assert reader.ask() == end._replace(lost=0, claimed=4, next_due=None)
    reader.move(end)
    found = reader.ask()
    assert (found.lost, found.claimed) == (4, 1)
    assert reader.plan(found) == [sent[5]]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_moved_ordered_consumer_gives_a_query_nothing_back(conn: Conn, ordering: str) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_keys(conn, *"abcab")
    end = reader.ask()
    seek(conn, "earliest")
    first = receive(conn, 1)  # by key, the others are assigned now
    assert reader.resume(end).planned == 0
    value(conn, "ack", claim_of(first))
    reader.move(end)
    got = seqs_of(first)
    while (found := reader.ask()).claimed:
        got += reader.plan(found)
        reader.move(found)
    assert sorted(got) == sent


def test_a_move_waits_for_who_settles_and_says_who_stays(conn: Conn, session: Session) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 3)
    claim = claim_of(receive(conn, 2))
    worker = session()
    worker.execute("begin")
    assert value(worker, "ack", claim) == 2
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(seek, conn, "earliest")
        wait_for_a_lock(worker)
        worker.execute("commit")
        assert moved.result() == 1
    assert acked(conn, "s", "c") == sent


def test_a_move_that_waits_loses_nothing_that_is_begun_meanwhile(
    conn: Conn, session: Session
) -> None:
    """Where something is dead, all that was taken is a gap: also what was taken while it waited."""
    consumer(conn)
    sent = [send(conn), send(conn)]
    value(conn, "dead_letter", claim_of(receive(conn, 1)))
    worker, slow = session(), session()
    worker.execute("begin")
    value(worker, "nack", claim_of(receive(worker, 1)))
    pool = ThreadPoolExecutor(1)
    moved = pool.submit(seek, conn, "earliest")
    wait_for_a_lock(worker)
    slow.execute("begin")
    late = send(slow)
    with connection.connect(conn.info.dsn) as other:
        sent.append(send(other))
    assert seqs_of(receive(worker)) == sent[1:]
    worker.execute("commit")
    moved.result()
    assert acked(conn, "s", "c") == sent[1:]
    slow.execute("commit")
    assert acked(conn, "s", "c") == [late]


def test_a_move_needs_to_see_what_others_committed(conn: Conn) -> None:
    consumer(conn)
    conn.execute("begin transaction isolation level repeatable read")
    with pytest.raises(psycopg.Error) as caught:
        seek(conn, "latest")
    conn.execute("rollback")
    assert caught.value.sqlstate == "PQ007"


# Replay


@pytest.mark.small_limits
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.promise(
    "feature: backfill and replay of the stream", "concepts: transitions of a message"
)
def test_what_was_finished_arrives_again_and_nothing_else(conn: Conn, ordering: str) -> None:
    """Not what is in hand, dead, or new; in the order of arrival, behind what is in the line."""
    consumer(conn, ordering=ordering)
    sent = send_keys(conn, *"aabbccdd")
    done = receive(conn, 4)
    value(conn, "ack", claim_of(done), seqs_of(done)[:2])
    value(conn, "dead_letter", claim_of(done), seqs_of(done)[2:3])
    finished, dead, in_hand = seqs_of(done)[:2], done[2].seq, seqs_of(done)[3:]
    new = send_keys(conn, "a")
    assert replay(conn, "earliest") == 2
    checker.check(conn)
    rest = everything(conn)
    if in_hand:
        value(conn, "ack", claim_of(done))
    rest += everything(conn)
    assert Counter(rest) == Counter({*sent, *new} - {dead} - set(in_hand))
    assert finished == [s for s in rest if s in finished]
    assert stats(conn).dead == 1
    assert replay(conn, f"seq {sent[1]}", f"seq {sent[3]}") == len({*sent[1:3]} - {dead})
    assert sorted(everything(conn)) == sorted({*sent[1:3]} - {dead})


def test_a_replay_from_within_a_publication_takes_nothing_from_one_before_it(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    value(conn, "ack", claim_of(receive(conn, 3)))
    rest = receive(conn, 2)
    assert replay(conn, "earliest") == 3
    assert replay(conn, f"seq {sent[1]}", f"seq {sent[2]}") == 0
    value(conn, "ack", claim_of(rest))
    assert replay(conn, f"seq {sent[4]}") == 1
    assert replay(conn, f"seq {sent[1]}", f"seq {sent[2]}") == 0
    assert acked(conn, "s", "c") == [*sent[:3], sent[4]]


def test_a_replay_between_two_times(conn: Conn) -> None:
    consumer(conn)
    send(conn)
    start = now(conn)
    between = [send(conn), *send_all(conn, ["x", "x"])]
    end = now(conn)
    send(conn)
    acked(conn, "s", "c")
    assert replay(conn, start, end) == 3
    assert replay(conn, end, start) == 0
    assert acked(conn, "s", "c") == between


def test_a_replay_is_of_what_is_for_the_consumer_with_its_priority(conn: Conn) -> None:
    consumer(conn)
    consumer(conn, "other")
    value(conn, "send", "s", "x", p_consumers=["other"])
    low, high = send(conn), send(conn, p_priority=5)
    assert acked(conn, "s", "c") == [high, low]
    assert replay(conn, "earliest") == 2
    assert [(m.seq, m.priority, m.deliver_count) for m in receive(conn)] == [
        (high, 5, 1),
        (low, 0, 1),
    ]


# Pause


@pytest.mark.promise("feature: pause and resume")
def test_a_paused_consumer_claims_nothing_and_still_owes(conn: Conn) -> None:
    for name in ORDERINGS:
        consumer(conn, name, name)
    sent = send_keys(conn, "a", "b", "c")
    for name in ORDERINGS:
        held = receive(conn, 1, name)
        for _ in range(2):
            call(conn, "pause", "s", name)
        assert receive(conn, name=name) == []
        assert receive(conn, name=name, p_ack=claim_of(held)) == []
    sent += send_keys(conn, "d")
    paused = "select paused from pgqueue.consumer_settings where consumer = %s"
    for name in ORDERINGS:
        assert receive(conn, name=name) == []
        assert one(conn, paused, name)
        assert stats(conn, name).backlog == 3
        for _ in range(2):
            call(conn, "resume", "s", name)
        assert sorted(acked(conn, "s", name)) == sent[1:]


def test_a_paused_consumer_gives_a_spark_query_nothing(reader: Reader) -> None:
    send(reader.conn)
    end = reader.ask()
    send(reader.conn)
    call(reader.conn, "pause", "s", "c")
    reader.move(end)
    nothing = reader.ask()
    assert (nothing.claim_id, nothing.claimed, nothing.next_due) == (end.claim_id, 0, None)
    assert stats(reader.conn).claimed == 0
    call(reader.conn, "resume", "s", "c")
    assert reader.ask().claimed == 1


# Races


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_workers_and_producers_go_on_while_a_consumer_is_moved(
    conn: Conn, url: str, ordering: str
) -> None:
    """Nothing is lost: all that was published after the last move is delivered, once."""
    consumer(conn, ordering=ordering)
    stop = threading.Event()
    delivered: Counter[int] = Counter()
    turn = threading.Lock()

    def produce(seed: int) -> None:
        rng = random.Random(seed)
        with connection.connect(url) as other:
            while not stop.is_set():
                other.execute("begin")
                send_keys(other, rng.choice("abcdefgh"), rng.choice("abcdefgh"))
                other.execute(rng.choice(["commit", "commit", "rollback"]))
                time.sleep(0.01)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        with connection.connect(url) as other:
            other.execute("set client_min_messages = error")
            while not stop.is_set():
                if found := receive(other, rng.choice([1, 3, 20])):
                    if rng.random() < 0.2:
                        value(other, "nack", claim_of(found))
                    elif value(other, "ack", claim_of(found)):
                        with turn:
                            delivered.update(seqs_of(found))

    pool = ThreadPoolExecutor(4)
    jobs = [pool.submit(work_, seed) for work_ in (produce, work) for seed in (1, 2)]
    rng = random.Random(0)
    try:
        for _ in range(4):
            seek(conn, rng.choice(["earliest", "latest", now(conn)]))
            checker.check(conn)
            replay(conn, "earliest", "latest")
            checker.check(conn)
            time.sleep(0.03)
        with turn:
            delivered.clear()
        last = seek(conn, "earliest")
        assert last >= 0
        checker.check(conn)
    finally:
        stop.set()
        pool.shutdown()
    for job in jobs:
        job.result()
    # what a worker holds goes back with its lease; here its owners are gone
    with turn:
        before = Counter(delivered)
    rest = acked(conn, "s", "c")
    held = set(states(conn))
    published = {s for (s,) in conn.execute("select seq from pgqueue.messages")}
    assert set(rest) | set(before) | held == published
    assert max(Counter(rest).values(), default=1) == 1


@pytest.mark.parametrize("through", ["note_offset", "create_consumer", "seek"])
def test_an_offset_that_nobody_has_read_decides_for_no_other_consumer(
    conn: Conn, session: Session, through: str
) -> None:
    """It says to have read what an open producer publishes later."""
    late = session()
    offset = value(conn, "start_offset", "s", "earliest")
    first = send_key(conn)
    dead_publication(conn)
    late.execute("begin")
    sent = send_key(late)
    forged = json.dumps({**offset, "next": 4})
    if through == "note_offset":
        value(conn, "create_group", "s", "forger", 1)
        value(conn, "note_offset", "s", "forger", Jsonb(json.loads(forged)))
    else:
        consumer(conn, "forger", p_start=forged if through == "create_consumer" else "latest")
        seek(conn, forged, "forger")
    consumer(conn, "other", p_start="latest")
    consumer(conn, "all")
    assert acked(conn, "s", "all") == [first]
    late.execute("commit")
    assert acked(conn, "s", "other") == [sent]
    assert acked(conn, "s", "all") == [sent]
    if through != "note_offset":
        assert acked(conn, "s", "forger") == [sent]


def test_an_old_snapshot_believes_no_offset_beside_an_open_producer(
    conn: Conn, session: Session
) -> None:
    """It does not see whether what the offset says to have read was published."""
    old, late = session(), session()
    old.execute("begin transaction isolation level repeatable read")
    old.execute("select from pgqueue.publications")
    offset = value(conn, "start_offset", "s", "earliest")
    late.execute("begin")
    sent = send_key(late)
    forged = json.dumps({**offset, "next": 2})
    with raises("PQ005", "does not see", "p_start"), old.transaction():
        consumer(old, "forger", p_start=forged)
    late.execute("commit")
    consumer(old, "forger", p_start=forged)
    old.execute("commit")
    assert acked(conn, "s", "forger") == []
    consumer(conn, "all")
    assert acked(conn, "s", "all") == [sent]
