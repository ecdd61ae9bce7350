"""Reading without claiming: offsets outside of the database, which mean the same for ever."""

import json
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import internals, limits
from tests.sql.cost import GROWTH, cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("allowed_afterwards")


def read(conn: Conn, offset: Any = None, size: int = 1000) -> tuple[list[int], Any]:
    """The numbers of the next messages, and the next offset."""
    rows = call(conn, "read", "s", None if offset is None else Jsonb(offset), size)
    return [row.seq for row in rows if row.seq is not None], rows[0].next_offset


def read_to(conn: Conn, offset: Any, *args: Any) -> Any:
    return value(conn, "read_to", "s", Jsonb(offset), *args)


def plan(conn: Conn, start: Any, end: Any) -> list[int]:
    rows = call(conn, "read_plan", "s", Jsonb(start), Jsonb(end))
    return [seq for row in rows for seq in range(row.lo, row.hi)]


def start(conn: Conn, at: str = "earliest") -> Any:
    return value(conn, "start_offset", "s", at)


def read_all(conn: Conn, offset: Any, size: int = 1000) -> tuple[list[int], Any]:
    """Everything, so many at a time."""
    got: list[int] = []
    while True:
        seqs, following = read(conn, offset, size)
        got += seqs
        if following == offset:
            return got, offset
        offset = following


def parts(offset: Any) -> set[str]:
    return set(offset) - {"stream", "incarnation", "messages"}


def test_an_offset_is_one_number(conn: Conn, stream: int) -> None:
    """After many publications, commits and rollbacks, while nobody publishes."""
    for i in range(20):
        send(conn)
        if i % 3 == 0:
            dead_publication(conn)
    seqs, offset = read(conn)
    assert len(seqs) == 20
    assert parts(offset) == {"next"}
    assert offset["messages"] == 20
    assert read(conn, offset) == ([], offset)


def test_reading_begins_where_it_is_told(conn: Conn, stream: int) -> None:
    first = send(conn)
    at = one(conn, "select clock_timestamp()").isoformat()
    second = send(conn)
    assert read(conn)[0] == read(conn, "earliest")[0] == [first, second]
    assert read(conn, at)[0] == [second]
    nothing, offset = read(conn, "latest")
    assert nothing == []
    third = send(conn)
    assert read(conn, offset)[0] == [third]
    with raises("PQ003", "earliest, latest"):
        read(conn, "yesterdays")


def test_what_commits_late_is_read_late_and_nothing_waits_for_it(
    conn: Conn, stream: int, session: Session
) -> None:
    slow, idle = session(), session()
    idle.execute("begin")
    idle.execute("select pg_current_xact_id()")
    slow.execute("begin")
    late = send(slow)
    early = send(conn)
    seqs, offset = read(conn)
    assert seqs == [early]
    assert parts(offset) == {"next", "gaps"}
    dead_publication(conn)
    seqs, second = read(conn, offset)
    assert seqs == []
    slow.execute("commit")
    seqs, end = read(conn, second)
    assert seqs == [late]
    assert parts(end) == {"next"}
    assert (plan(conn, offset, end), plan(conn, start(conn), offset)) == ([late], [early])
    assert plan(conn, start(conn), end) == sorted([late, early])


def test_a_gap_stays_until_all_that_published_beside_it_are_over(
    conn: Conn, stream: int, session: Session
) -> None:
    """Not one look too early, and not for longer, however many publish meanwhile."""
    one_, two = session(), session()
    for slow in (one_, two):
        slow.execute("begin")
        send(slow)
    send(conn)
    _, offset = read(conn)
    assert len(offset["gaps"][0]["publishers"]) == 2
    two.execute("rollback")
    two.execute("begin")
    send(two)
    send(conn)
    _, offset = read(conn, offset)
    assert [len(gap["publishers"]) for gap in offset["gaps"]] == [1, 2]
    one_.execute("rollback")
    _, offset = read(conn, offset)
    assert [len(gap["publishers"]) for gap in offset["gaps"]] == [1]
    two.execute("rollback")
    _, offset = read(conn, offset)
    assert parts(offset) == {"next"}


def test_at_an_old_snapshot_no_gap_is_closed(conn: Conn, stream: int, session: Session) -> None:
    """Its publisher may be over, and seen only by later ones."""
    slow, old = session(), session()
    slow.execute("begin")
    late = send(slow)
    early = send(conn)
    old.execute("begin transaction isolation level repeatable read")
    old.execute("select from pgqueue.streams")
    slow.execute("commit")
    seqs, offset = read(old)
    assert (seqs, offset["gaps"]) == ([early], [{"ids": "{[1,2)}", "publishers": None}])
    assert read(old, offset) == ([], offset)
    assert read(conn, offset)[0] == [late]


def test_a_prepared_transaction_keeps_its_gap_open(conn: Conn, stream: int) -> None:
    conn.execute("update pgqueue.streams set notify = false")
    conn.execute("begin")
    late = send(conn)
    conn.execute("prepare transaction 'reading'")
    early = send(conn)
    seqs, offset = read(conn)
    assert (seqs, read(conn, offset)) == ([early], ([], offset))
    conn.execute("commit prepared 'reading'")
    assert read(conn, offset)[0] == [late]


def test_a_limit_is_exact_inside_a_publication(conn: Conn, stream: int, session: Session) -> None:
    """What was cut is read first, also when something has appeared in a gap meanwhile."""
    slow = session()
    slow.execute("begin")
    late = [row[0] for row in call(slow, "send_batch", "s", list("abcde"))]
    sent = send_all(conn, list("abcdefgh"))
    first, offset = read(conn, None, 3)
    assert (first, offset["cut"]) == (sent[:3], [[2, 3]])
    second, offset = read(conn, offset, 2)
    assert (second, offset["cut"]) == (sent[3:5], [[2, 5]])
    slow.execute("commit")
    third, after_cut = read(conn, offset, 5)
    assert (third, after_cut["cut"]) == (late[:2] + sent[5:], [[1, 2]])
    fourth, end = read(conn, after_cut, 3)
    assert (fourth, parts(end)) == (late[2:], {"next"})
    assert plan(conn, offset, after_cut) == third
    assert plan(conn, offset, end) == sorted(third + fourth)
    assert end["messages"] == 13


def test_the_parts_of_a_batch_are_cut_in_their_order(conn: Conn, stream: int) -> None:
    """A sink publishes a part for each priority: a limit may end in any."""
    blocks = [stage(conn, stream, 4, p_priority=p) for p in (0, 5, 0)]
    publish(conn, stream, blocks, 12)
    whole = read(conn)[0]
    for size in (1, 3, 5, 7):
        got, end = read_all(conn, start(conn), size)
        assert sorted(got) == whole
        assert parts(end) == {"next"}


@pytest.mark.small_limits
def test_any_two_offsets_have_the_same_messages_between_them_for_ever(
    conn: Conn, stream: int, session: Session
) -> None:
    """Sends, rollbacks and late commits by chance; every step is planned again in the end.

    And consumers that began at an offset, or were moved there, have what was not read up to it.
    """
    rng = random.Random(5)
    slow: list[Conn] = []
    offset = start(conn)
    steps = []
    sent: set[int] = set()
    pending: dict[int, set[int]] = {}
    consumer(conn, "named")
    consumer(conn, "moved")
    value(conn, "create_group", "s", "g", 1)
    begun: dict[str, set[int]] = {}
    moved: set[int] = set()
    for _ in range(90):
        match rng.choice("sbdnolrrr"):
            case "s":
                sent.add(send(conn))
            case "b":
                sent |= set(send_all(conn, ["x"] * rng.randint(2, 6)))
            case "d":
                dead_publication(conn)
            case "n":
                send(conn, p_consumers=["named"])
            case "o" if len(slow) < 3:
                other = session()
                other.execute("begin")
                pending[id(other)] = set(send_all(other, ["x"] * rng.randint(1, 3)))
                slow.append(other)
            case "l" if slow:
                other = slow.pop(rng.randrange(len(slow)))
                ended = rng.choice(["commit", "rollback"])
                other.execute(ended.encode())
                if ended == "commit":
                    sent |= pending[id(other)]
                other.close()
            case "r":
                isolation = rng.choice(["read committed", "read committed", "repeatable read"])
                with conn.transaction():
                    conn.execute(f"set transaction isolation level {isolation}".encode())
                    seqs, following = read(conn, offset, rng.choice([1, 2, 3, 5, 100]))
                steps.append((offset, following, seqs))
                offset = following
                moved |= set(seqs)
                name = f"from {len(steps)}"
                consumer(conn, name, p_start=json.dumps(offset))
                begun[name] = set(moved)
                value(conn, "seek", "s", "moved", json.dumps(offset))
                value(conn, "note_offset", "s", "g", Jsonb(offset))
            case _:
                pass
    for other in slow:
        other.execute("rollback")
    assert len(begun) > 20
    for name, before in {**begun, "moved": moved}.items():
        assert sorted(acked(conn, "s", name)) == sorted(sent - before)
    lease = call(conn, "lease_partitions", "s", "g", "w")[0].lease_id
    rows = call(conn, "read_partitions", "s", "g", [lease], 1000)
    assert sorted(row.seq for row in rows if row.seq is not None) == sorted(sent - moved)
    rest, end = read_all(conn, offset)
    got = [seq for _, _, seqs in steps for seq in seqs] + rest
    assert sorted(got) == sorted(sent)
    assert parts(end) == {"next"}
    for before, after, seqs in steps:
        assert plan(conn, before, after) == seqs
    assert plan(conn, start(conn), end) == sorted(sent)
    assert end["messages"] == len(sent)


def test_readers_and_producers_race(url: str, conn: Conn, stream: int) -> None:
    """Producers that commit, roll back and take their time: each message is read once by each."""
    ended = threading.Event()

    def produce(seed: int) -> list[int]:
        rng = random.Random(seed)
        sent: list[int] = []
        with connection.connect(url) as own:
            for _ in range(150):
                own.execute("begin")
                seqs = send_all(own, ["x"] * rng.randint(1, 4))
                if rng.random() < 0.1:
                    own.execute("select pg_sleep(0.005)")
                if rng.random() < 0.3:
                    own.execute("rollback")
                else:
                    own.execute("commit")
                    sent += seqs
        return sent

    def follow(seed: int) -> list[int]:
        rng = random.Random(seed)
        offset, got = None, []
        with connection.connect(url) as own:
            while True:
                over = ended.is_set()
                seqs, following = read(own, offset, rng.choice([1, 3, 50]))
                got += seqs
                assert len(json.dumps(following)) < 2000
                if over and following == offset:
                    return got
                offset = following

    with ThreadPoolExecutor(6) as pool:
        producers = [pool.submit(produce, seed) for seed in range(4)]
        readers = [pool.submit(follow, seed) for seed in range(2)]
        try:
            published = sorted(seq for each in producers for seq in each.result())
        finally:
            ended.set()
        for each in readers:
            assert sorted(each.result()) == published


def test_a_reader_sees_what_was_published_to_all(conn: Conn, stream: int) -> None:
    """Not what is for named consumers, and also what is for later."""
    consumer(conn)
    send(conn, p_consumers=["c"])
    nothing, offset = read(conn)
    assert (nothing, offset["next"]) == ([], 2)
    late = send(conn, p_deliver_at=one(conn, "select clock_timestamp() + interval '1 day'"))
    assert read(conn, offset)[0] == [late]


def test_messages_come_whole(conn: Conn, stream: int) -> None:
    seq = send(conn, "data", p_key="k", p_headers='{"h": 1}')
    (row,) = call(conn, "read", "s")
    assert (row.seq, row.key, row.data, row.data_bytes, row.headers) == (
        seq, "k", "data", None, {"h": 1},
    )  # fmt: skip
    assert row.inserted_at is not None


def test_reading_writes_nothing(conn: Conn, stream: int) -> None:
    """So it works in a read-only transaction, as on a standby."""
    send(conn)
    conn.execute("begin transaction read only")
    seqs, offset = read(conn)
    assert (seqs, plan(conn, start(conn), offset)) == ([1], [1])
    conn.execute("commit")


def test_many_gaps_are_warned_of_and_have_an_end(conn: Conn, stream: int, session: Session) -> None:
    """Beside a transaction that stays open: the offset stops at its limit, and goes on after it."""
    limits.set_constant(conn, "max_offset_ranges", 5)
    limits.set_constant(conn, "limit_gap_ranges", 3)
    for _ in range(30):  # history: nobody is open, so nothing of it is a gap
        dead_publication(conn)
        send(conn)
    history, offset = read_all(conn, start(conn), 7)
    assert len(history) == 30
    consumer(conn)
    assert acked(conn, "s", "c") == acked(conn, "s", "c") + history
    slow = session()
    slow.execute("begin")
    send(slow)
    sent = []
    for _ in range(20):
        sent.append(send(conn))
        dead_publication(conn)
    with warned(conn) as told:
        got, offset = read_all(conn, offset, 7)
    assert 3 < len(got) < 20
    assert "gaps" in told[-1]
    assert f"process {slow.info.backend_pid}" in told[-1]
    # what the consumer has taken is known to be visible or dead
    assert read_all(conn, start(conn), 7)[0] == history + got
    value(conn, "drop_consumer", "s", "c")
    assert len(read_all(conn, start(conn), 7)[0]) < 10
    slow.execute("rollback")
    rest, end = read_all(conn, offset, 7)
    assert got + rest == sent
    assert parts(end) == {"next"}


NO_OFFSETS: list[tuple[Any, str, str]] = [
    (lambda o: "x" * 3, "p_offset must be earliest", "PQ003"),
    (lambda o: 7, "not an object", "PQ003"),
    (lambda o: [], "not an object", "PQ003"),
    (lambda o: {}, "no stream", "PQ003"),
    (lambda o: {**o, "next": "7"}, "its next is", "PQ003"),
    (lambda o: {**o, "next": 0}, "its next is 0", "PQ003"),
    (lambda o: {**o, "next": 1.5}, "its next is 1.5", "PQ003"),
    (lambda o: {**o, "next": 1e300}, "its next is", "PQ003"),
    (lambda o: {**o, "messages": -1}, "its messages is -1", "PQ003"),
    (lambda o: {**o, "cut": [1]}, "not a list of pairs", "PQ003"),
    (lambda o: {**o, "cut": [[1, 1]]}, "its cut was read", "PQ003"),
    (lambda o: {**o, "gaps": {}}, "not a list", "PQ003"),
    (lambda o: {**o, "gaps": [{"ids": "{[1,2"}]}, "sets of numbers", "PQ003"),
    (lambda o: {**o, "gaps": [{"ids": "{[1,200)}"}]}, "sets of numbers", "PQ003"),
    (lambda o: {**o, "stream": "t"}, "belongs to stream 't', not to stream 's'", "PQ005"),
    (lambda o: {**o, "incarnation": str(uuid.uuid4())}, "another stream named", "PQ005"),
    (lambda o: {**o, "next": 100}, "ahead of the database", "PQ005"),
]  # fmt: skip


def test_what_is_no_offset_of_the_stream_is_refused(conn: Conn, stream: int) -> None:
    send(conn)
    send(conn)
    _, offset = read(conn)
    for change, said, sqlstate in NO_OFFSETS:
        with pytest.raises(psycopg.DatabaseError, match=said) as error:
            read(conn, change(offset))
        assert error.value.sqlstate == sqlstate
        assert error.value.diag.column_name in ("p_offset", "p_start")


def test_no_consumer_is_moved_to_what_is_no_offset_of_the_stream(conn: Conn, stream: int) -> None:
    consumer(conn)
    value(conn, "create_group", "s", "g", 1)
    send_all(conn, ["x"] * 2)
    _, offset = read(conn)
    for change, said, sqlstate in NO_OFFSETS:
        if not isinstance(changed := change(offset), dict):
            continue
        for function, argument, given in (
            ("seek", "p_to", json.dumps(changed)),
            ("note_offset", "p_offset", Jsonb(changed)),
        ):
            with pytest.raises(psycopg.DatabaseError, match=said) as error:
                value(conn, function, "s", "c" if function == "seek" else "g", given)
            assert error.value.sqlstate == sqlstate
            assert error.value.diag.column_name == argument
    refused = "is not an offset of a stream: it is not"
    with pytest.raises(psycopg.DatabaseError, match=f"p_to {refused} JSON"):
        value(conn, "seek", "s", "c", "{oops")
    for none in (None, Jsonb("latest"), Jsonb([])):
        with pytest.raises(psycopg.DatabaseError, match=f"p_offset {refused} an object"):
            value(conn, "note_offset", "s", "g", none)
    assert len(acked(conn, "s", "c")) == 2


def test_what_a_transaction_does_not_see_of_an_offset_is_said(
    conn: Conn, stream: int, session: Session
) -> None:
    """Where nothing was cut, nothing needs to be seen."""
    old = session()
    old.execute("begin transaction isolation level repeatable read")
    old.execute("select from pgqueue.publications")
    sent = send_all(conn, list("abcde"))
    cut, whole = (read_to(conn, start(conn), most) for most in (3, 5))
    value(old, "create_consumer", "s", "whole", json.dumps(whole))
    with raises("PQ005", "does not see", "p_start"), old.transaction():
        value(old, "create_consumer", "s", "cut", json.dumps(cut))
    old.execute("commit")
    value(old, "create_consumer", "s", "cut", "\n  " + json.dumps(cut, indent=2))
    assert acked(conn, "s", "cut") == sent[3:]
    assert acked(conn, "s", "whole") == []


def test_an_offset_that_was_made_up_skips_nothing(conn: Conn, stream: int) -> None:
    sent = send_all(conn, ["x"] * 3)
    begin = start(conn)
    for cut in ([[2, 1]], [[1, 1], [1, 1]]):
        with raises("PQ003", "its cut"):
            read(conn, {**begin, "cut": cut})
    assert read(conn, {**begin, "cut": [[1, 1]]})[0] == sent[1:]
    assert read(conn, {**begin, "cut": [[1, 99]]})[0] == []


def test_a_bound_before_all_that_there_is_leaves_gaps_as_they_are(
    conn: Conn, stream: int, session: Session
) -> None:
    slow = session()
    slow.execute("begin")
    late = send(slow)
    send(conn)
    _, offset = read(conn)
    for upto in (0, -1):
        assert read_to(conn, offset, None, upto) == offset
    slow.execute("commit")
    assert read_to(conn, offset, None, 0) == offset
    assert read(conn, offset)[0] == [late]


def test_a_read_costs_what_it_reads_however_much_comes_after_it(conn: Conn, stream: int) -> None:
    begin = start(conn)
    blocks: dict[tuple[int, str], int] = {}
    for size in (1_000, 20_000):
        internals.publish_singly(conn, stream, size, "null")
        for function, want in (("read", 5), ("read_to", 300)):
            query = f"select * from pgqueue.{function}('s', %s, {want})"
            blocks[size, function] = min(cost(conn, query, Jsonb(begin)) for _ in range(3))
    for function in ("read", "read_to"):
        assert blocks[20_000, function] <= blocks[1_000, function] * GROWTH + 20, f"{blocks}"
    value(conn, "drop_stream", "s")  # the checker would read all of it


def test_offsets_of_a_dropped_stream_are_refused(conn: Conn, stream: int) -> None:
    send(conn)
    _, offset = read(conn)
    value(conn, "drop_stream", "s")
    value(conn, "create_stream", "s")
    send(conn)
    with raises("PQ005", "dropped since"):
        read(conn, offset)


def test_a_plan_goes_forward(conn: Conn, stream: int) -> None:
    first = start(conn)
    send(conn)
    _, second = read(conn, first)
    with pytest.raises(psycopg.DatabaseError, match="p_to is before p_from"):
        plan(conn, second, first)
    with pytest.raises(psycopg.DatabaseError, match="p_max must be 1 to"):
        read(conn, first, 0)
    with pytest.raises(psycopg.DatabaseError, match="p_max must be null or"):
        read_to(conn, first, 0)
    assert read_to(conn, first, None, 0) == first


def test_reading_begins_at_a_number(conn: Conn, stream: int, session: Session) -> None:
    """Publications that have lower numbers too are cut there: several, where blocks were mixed."""
    blocks = [stage(conn, stream, 3, batch) for batch in (0, 1, 0, 1)]
    for batch in (0, 1):
        publish(conn, stream, blocks[batch::2], 6, batch)
    send(conn)
    begin = start(conn, "seq 8")
    assert len(begin["cut"]) == 2
    seqs, end = read(conn, begin)
    assert seqs == [8, 9, 10, 11, 12, 13]
    assert end["messages"] == 6
    for size in (1, 2, 4):
        got, last = read_all(conn, begin, size)
        assert sorted(got) == seqs
        assert last == end
        assert plan(conn, begin, last) == seqs


def test_an_end_is_never_before_what_was_read(conn: Conn, stream: int, session: Session) -> None:
    """A dead publication is known to be dead while nobody publishes, and not beside somebody."""
    first = send(conn)
    at = one(conn, "select clock_timestamp()").isoformat()
    dead_publication(conn)
    numbers = send_all(conn, ["x"] * 4)
    begun = start(conn)
    middle = read_to(conn, begun, 3)
    assert parts(middle) == {"next", "cut"}
    busy = session()
    busy.execute("begin")
    late = send(busy)
    ends = {each: value(conn, "end_offset", "s", Jsonb(middle), each) for each in ("latest", at)}
    busy.execute("commit")
    assert plan(conn, middle, ends["latest"]) == numbers[2:]
    assert plan(conn, middle, ends[at]) == []
    assert plan(conn, ends["latest"], read_to(conn, ends["latest"])) == [late]
    assert plan(conn, ends[at], read_to(conn, ends[at])) == [*numbers[2:], late]
    assert plan(conn, begun, value(conn, "end_offset", "s", Jsonb(begun), at)) == [first]


def test_who_is_behind_knows_how_far_and_since_when(conn: Conn, stream: int) -> None:
    offset = read_to(conn, start(conn))
    consumer(conn, "c")
    send(conn, "for others", p_consumers=["c"])
    send_all(conn, ["x"] * 3)
    (row,) = call(conn, "offset_lag", "s", Jsonb(offset))
    since = one(conn, "select max(published_at) from pgqueue.publications")
    assert (row.messages, row.since) == (3, since)
    some = read_to(conn, offset, 2)
    assert value(conn, "size_between", "s", Jsonb(offset), Jsonb(some)) == 2
    assert value(conn, "size_between", "s", Jsonb(some), Jsonb(some)) == 0
    (row,) = call(conn, "offset_lag", "s", Jsonb(some))
    assert (row.messages, row.since) == (1, since)
    (row,) = call(conn, "offset_lag", "s", Jsonb(read_to(conn, offset)))
    assert (row.messages, row.since) == (0, None)
