"""A message that kills its query ends alone in the dead letters, and the query goes on."""

import random
import uuid
from collections import Counter
from math import ceil, log2
from typing import Any

import psycopg
import pytest

from tests.sql import checker, clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

AFTER = 3


def run(
    reader: Reader, poison: set[int], after: int | None = AFTER, starts: int = 100
) -> tuple[list[int], list[int]]:
    """A query that dies at a poisonous message and is started again, until nothing is left.

    Returns: what it processed, in order, and the sizes of the batches that killed it.
    """
    done: list[int] = []
    deaths: list[int] = []
    end: Any = None  # of the batch that Spark's log has
    for _ in range(starts):
        while True:
            if end is None:
                end = reader.ask()
                if not end.claimed:
                    return done, deaths
            row = reader.start(end, after)
            batch = reader.plan(end)
            assert row.planned == len(batch)
            checker.check(reader.conn)
            if poison & set(batch):
                deaths.append(len(batch))
                break
            done += batch
            reader.move(end)
            end = None
    return done, deaths


@pytest.mark.small_limits
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize(
    "position", [37, *(pytest.param(i, marks=pytest.mark.longer) for i in (0, 99))]
)
def test_the_message_that_kills_its_query_dies_alone(
    conn: Conn, ordering: str, position: int
) -> None:
    """After as many starts as were allowed, and some log2(n) more; all others are processed."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 100, p_keys=[f"k{i % 7}" for i in range(100)])
    poison = sent[position]
    done, deaths = run(reader, {poison})
    assert sorted(done) == [seq for seq in sent if seq != poison]
    assert deaths[:AFTER] == [100] * AFTER
    assert len(deaths) <= AFTER + ceil(log2(100))
    assert deaths[-1] == 1
    (dead,) = internals.dead_letters(conn)
    assert (dead.reason, dead.message_count) == ("poison", 1)
    assert "was started" in dead.note["error"]
    assert states(conn) == {poison: "dead"}
    if ordering == "stream":
        assert done == sorted(done)
    if ordering == "key":
        for k in range(7):
            of_key = [seq for seq in done if sent.index(seq) % 7 == k]
            assert of_key == sorted(of_key)


def test_without_quarantine_the_same_messages_come_for_ever(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn, max_deliver_count=1))
    sent = send_all(conn, ["x"] * 4)
    done, deaths = run(reader, {sent[0]}, None, starts=7)
    assert (done, deaths) == ([], [4] * 7)
    assert state(conn, sent[0]).deliver_count == 7


def test_the_starts_count_though_nobody_asked_for_quarantine_then(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 8)
    end = reader.ask()
    for _ in range(5):
        reader.start(end, None)
    row = reader.start(end, 5)
    assert (row.planned, row.returned, row.poison) == (4, 4, 0)
    assert reader.plan(end) == sent[:4]


def test_one_process_begins_a_batch_once_however_often_it_plans_it(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn))
    send_all(conn, ["x"] * 8)
    end = reader.ask()
    process = uuid.uuid4()
    for _ in range(5):
        assert reader.resume(end, process).planned == 8
    assert reader.start(end, 2).planned == 8
    assert reader.start(end, 2).planned == 4


def test_a_batch_that_was_finished_starts_anew(conn: Conn) -> None:
    """Whatever happened to the one before it."""
    reader = Reader(conn, consumer(conn))
    send_all(conn, ["x"] * 8)
    first = reader.ask(4)
    for _ in range(AFTER):
        assert reader.start(first, AFTER).planned == 4
    reader.move(first)
    second = reader.ask(4)
    for _ in range(AFTER):
        assert reader.start(second, AFTER).planned == 4
    assert reader.start(second, AFTER).planned == 2


@pytest.mark.small_limits
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_what_went_back_comes_in_its_order_without_others_and_counted_as_delivered_before(
    conn: Conn, ordering: str
) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 8, p_keys=[*"abababab"])
    end = reader.ask()
    for _ in range(AFTER):
        reader.start(end, AFTER)
    row = reader.start(end, AFTER)
    first = reader.plan(end)
    assert (row.planned, row.returned, row.taken_over, row.gone) == (4, 4, 0, 0)
    assert first == sent[:4]
    new = send_all(conn, ["x"] * 2, p_keys=[*"ab"])
    assert {state(conn, seq).deliver_count for seq in sent[4:]} == {AFTER}
    reader.move(end)
    (end, second), done = batch(reader, 100), []
    assert len(second) <= 4
    assert set(second) <= set(sent[4:])
    while second:
        done += second
        reader.move(end)
        end, second = batch(reader, 100)
    assert sorted(done) == sent[4:] + new
    if ordering == "stream":
        assert done == sorted(done)


def batch(reader: Reader, size: int) -> tuple[Any, list[int]]:
    """The next batch, and what is in it."""
    end = reader.ask(size)
    return end, reader.plan(end) if end.claimed else []


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_what_went_back_is_not_lost_and_never_had_back(conn: Conn, ordering: str) -> None:
    """Its offsets stand for what is left, also after its lease: others have the rest."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 4, p_keys=[*"abcd"])
    end = reader.ask()
    for _ in range(AFTER):
        reader.start(end, AFTER)
    assert reader.start(end, AFTER).returned == 2
    assert reader.lost(end) == 0
    clock.end_leases(conn)
    rows = receive(conn, 1)
    value(conn, "nack", claim_of(rows))
    clock.look_again(conn)
    row = reader.resume(end)
    assert set(reader.plan(end)) <= set(sent[:2])
    assert row.planned + row.taken_over == 2
    reader.move(end)
    reader.ask()
    assert set(states(conn)) >= set(sent[2:])


@pytest.mark.parametrize("sink", ["query 1", "txn:a"])
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_batch_that_a_sink_of_this_database_published_is_finished(
    conn: Conn, stream: int, ordering: str, sink: str
) -> None:
    """The process died before Spark noted it: a cut would publish the second half again."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    send_all(conn, ["x"] * 4)
    first = reader.ask(2)
    value(conn, "reader_query", reader.id, "query 1")
    reader.start(first, AFTER)
    chunk = stage(conn, stream, 2, 0, sink)
    with conn.transaction():
        if sink != "query 1":  # in foreachBatch
            value(conn, "begin_write_of", "query 1")
        value(conn, "publish_staged", sink, 0, stream, [chunk], 2)
    for _ in range(9):
        assert reader.start(first, AFTER).planned == 2
    reader.move(first)
    second = reader.ask(2)
    for _ in range(AFTER):
        assert reader.start(second, AFTER).planned == 2
    assert reader.start(second, AFTER).planned == 1, "what was published was another batch"


def test_a_message_that_came_alone_dies_after_as_many_starts(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 2)
    end = reader.ask(1)
    for _ in range(AFTER):
        assert reader.start(end, AFTER).planned == 1
    row = reader.start(end, AFTER)
    assert (row.planned, row.returned, row.poison) == (0, 0, 1)
    assert reader.plan(end) == []
    assert (reader.start(end, AFTER).poison, reader.lost(end)) == (0, 0)
    (dead,) = internals.dead_letters(conn)
    assert (dead.reason, dead.deliver_count) == ("poison", AFTER)
    assert value(conn, "redrive", "s", "c") == 1
    assert reader.start(end, AFTER).planned == 0, "it is nobody's now"
    reader.move(end)
    assert reader.ask().lost == 0
    assert sorted(states(conn)) == sent


def test_a_message_that_workers_failed_with_is_not_dead_before_the_query_failed_as_often(
    conn: Conn,
) -> None:
    """It is suspected, and so alone, but a query may fail once for another reason."""
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 2)
    for _ in range(2):
        value(conn, "nack", claim_of(receive(conn)))
    end = reader.ask()
    assert reader.plan(end) == sent[:1]
    for _ in range(3):
        assert reader.start(end, 5).planned == 1
    assert reader.start(end, 5).poison == 1


def test_workers_keep_apart_what_is_suspected(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 8)
    end = reader.ask()
    for _ in range(AFTER + 1):
        reader.start(end, AFTER)
    assert seqs_of(receive(conn, 100)) == sent[4:]
    clock.end_leases(conn)
    assert len(receive(conn, 100)) <= 4


@pytest.mark.small_limits
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("seed", [1, pytest.param(range(2, 5), marks=pytest.mark.longer)])
def test_any_history_with_poison_processes_all_others_once(
    conn: Conn, ordering: str, seed: Any
) -> None:
    """Runs of many kinds, workers beside the query, leases that end, and several that kill it."""
    for each in [seed] if isinstance(seed, int) else seed:
        rng = random.Random(f"{ordering} {each}")
        conn.execute("select pgqueue.drop_stream('s')")
        conn.execute("select pgqueue.create_stream('s')")
        reader = Reader(conn, consumer(conn, ordering=ordering))
        sent: list[int] = []
        for _ in range(rng.randrange(2, 6)):
            keys = [rng.choice(["a", "b", "c", None]) for _ in range(rng.randrange(1, 12))]
            sent += send_all(conn, ["x"] * len(keys), p_keys=keys, p_priority=rng.randrange(2))
        poison = set(rng.sample(sent, rng.randrange(1, 3)))
        done: Counter[int] = Counter()
        while sent[-1] not in poison and rng.random() < 0.5 and (rows := receive(conn, 3)):
            if poison & set(seqs_of(rows)) or rng.random() < 0.5:
                value(conn, "nack", claim_of(rows), rng.choice([None, seqs_of(rows)[:1]]))
            else:
                done.update(seqs_of(rows))
                value(conn, "ack", claim_of(rows))
        clock.end_leases(conn)  # of what a worker has left of its claim
        processed, _ = run(reader, poison, rng.choice([1, 2, 5]), starts=400)
        done.update(processed)
        assert done == Counter(seq for seq in sent if seq not in poison)
        assert states(conn) == dict.fromkeys(poison, "dead")
        assert acked(conn, "s", "c") == []


@pytest.mark.parametrize("after", [0, -1])
def test_a_number_of_starts_is_at_least_1(conn: Conn, reader: Reader, after: int) -> None:
    send_keys(conn, "a")
    end = reader.ask()
    with pytest.raises(
        psycopg.Error, match="p_quarantine_after must be null or at least 1"
    ) as error:
        reader.start(end, after)
    assert (error.value.sqlstate, error.value.diag.column_name) == (
        "PQ003", "p_quarantine_after",
    )  # fmt: skip
    assert call(conn, "reader_plan", reader.id, 0, end.claim_id) != []


@pytest.mark.parametrize(
    ("ordering", "poison_in", "order"),
    [
        ("none", 0, (0, 1)),
        ("key", 0, (1, 0)),
        pytest.param("key", 1, (0, 1), marks=pytest.mark.longer),
        pytest.param("none", 1, (1, 0), marks=pytest.mark.longer),
    ],
)
@pytest.mark.promise("checkpoints: Several sources")
def test_a_query_of_two_sources_gives_up_the_message_to_blame_and_no_other(
    conn: Conn, ordering: str, poison_in: int, order: tuple[int, int]
) -> None:
    """A failed start blames neither source: a message dies when it failed alone in the batch."""
    readers, sent, done = [], [], [[], []]
    for name in "st":
        if name == "t":
            value(conn, "create_stream", "t")
        made = value(conn, "create_consumer", name, "c", p_start="earliest", p_ordering=ordering)
        readers.append(Reader(conn, made))
        sent.append([row[0] for row in call(conn, "send_batch", name, ["x"] * 9)])
    poison = sent[poison_in][4]
    ends: list[Any] = [None, None]
    for _ in range(60):
        if ends == [None, None]:
            ends = [reader.ask(5) for reader in readers]
            if not any(end.claimed for end in ends):
                break
        for i in order:
            if ends[i].claimed:
                readers[i].start(ends[i], AFTER)
        batches = [readers[i].plan(ends[i]) if ends[i].claimed else [] for i in (0, 1)]
        for i in order:
            value(conn, "reader_query", readers[i].id, "query")
        checker.check(conn)
        if poison in batches[poison_in]:
            continue
        for i in (0, 1):
            done[i] += batches[i]
            readers[i].move(ends[i])
        ends = [None, None]
    assert [sorted(each) for each in done] == [
        [seq for seq in each if (i, seq) != (poison_in, poison)] for i, each in enumerate(sent)
    ]
    found = [call(conn, "read_dead", name, "c", p_max=10) for name in "st"]
    assert [[(each.seq, each.reason) for each in some] for some in found] == [
        [(poison, "poison")] if i == poison_in else [] for i in (0, 1)
    ]


@pytest.mark.parametrize("query", [None, "query 1"])
def test_what_is_left_of_a_batch_is_judged_without_what_the_query_acted_on(
    conn: Conn, query: str | None
) -> None:
    """A message that is alone since the query settled the other one dies like any that is alone."""
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 2)
    end = reader.ask()
    value(conn, "reader_query", reader.id, "query 1")
    reader.start(end, None)
    with conn.transaction():
        value(conn, "begin_write_of", query)
        settle(conn, action("ack", sent[:1]), sink="txn:a", p_query_id=query)
    rows = [reader.start(end, AFTER) for _ in range(AFTER + 2)]
    assert sum(row.poison for row in rows) == 1
    assert states(conn) == {sent[1]: "dead"}
