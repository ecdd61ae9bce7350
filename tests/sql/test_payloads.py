"""How a claim reads the payloads of its messages: with plans that are kept, by one function."""

import re
from collections.abc import Callable

import pytest

from spark_pgqueue.postgres import schema
from tests.sql.catalogue import catalogue
from tests.sql.queue import Conn, call, consumer, one, receive, send, send_all, seqs_of, value

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def plans(conn: Conn, act: Callable[[], object]) -> list[str]:
    """The plans that are made, as the server prints them."""
    made: list[str] = []

    def note(notice) -> None:
        if notice.message_primary.startswith("plan"):
            made.append(notice.message_detail)

    conn.add_notice_handler(note)
    conn.execute("set client_min_messages = log; set debug_print_plan = on")
    try:
        act()
    finally:
        conn.execute("reset debug_print_plan; reset client_min_messages")
        conn.remove_notice_handler(note)
    return made


@pytest.mark.parametrize(("stream_id", "planned"), [(1, 1), (32, 1), (33, 2)])
def test_payloads_are_read_with_a_plan_that_is_kept(
    conn: Conn, stream_id: int, planned: int
) -> None:
    """Only the caller's statement is planned; of later streams the call of their function too."""
    conn.prepare_threshold = None
    value(conn, "drop_stream", "s")
    call(conn, "maintain")
    conn.execute(f"alter table pgqueue.streams alter stream_id restart with {stream_id}".encode())
    assert value(conn, "create_stream", "s") == stream_id
    consumer(conn)
    sent = send_all(conn, ["x"] * 100)
    for n in range(3):
        assert seqs_of(receive(conn, 10)) == sent[n * 10 : n * 10 + 10]
    made = plans(conn, lambda: receive(conn, 10))
    assert len(made) == planned
    assert not any("SCAN " in plan.replace("FUNCTIONSCAN ", "") for plan in made)


@pytest.mark.parametrize("function", ["payload", "payloads"])
def test_the_function_of_a_stream_is_found_by_few_comparisons(conn: Conn, function: str) -> None:
    """Each costs as much as a twentieth of a query. One after the other, there were up to 32."""
    body = one(conn, "select prosrc from pg_proc where proname = %s", function)
    pattern = r"(els)?if p_stream_id <= (\d+)|(else)\n|(end if;)\n|_pgqueue.payloads?_(\d+)\("
    ranges: list[tuple[int, int]] = []  # of each if that is open: which streams come here
    called = []
    for elsif, upto, otherwise, end, stream_id in re.findall(
        pattern, body[body.index("if p_stream_id") :]
    ):
        if elsif or otherwise:
            ranges.append((ranges.pop()[1], int(upto or 99)))
        elif upto:
            ranges.append((0, int(upto)))
        elif end:
            ranges.pop()
        else:
            assert all(low < int(stream_id) <= high for low, high in ranges)
            assert len(ranges) == 5
            called.append(int(stream_id))
    assert called == list(range(1, 33))


def test_a_stream_has_a_function_that_reads_payloads_as_long_as_it_exists(conn: Conn) -> None:
    made = "select count(*) from pg_proc where proname like 'payloads\\_%'"
    assert one(conn, made) == 1
    other = value(conn, "create_stream", "other")
    assert one(conn, made) == 2
    public = "select has_function_privilege('public', %s::regproc, 'execute')"
    assert one(conn, public, f"_pgqueue.payloads_{other}") is False
    value(conn, "drop_stream", "other")
    call(conn, "maintain")
    assert one(conn, made) == 1


def test_installing_again_makes_the_functions_of_streams_anew(conn: Conn, stream: int) -> None:
    """Also where they are gone, or of another version."""
    consumer(conn)
    value(conn, "create_stream", "other")
    before = catalogue(conn)
    conn.execute(f"drop function _pgqueue.payloads_{stream}".encode())
    conn.execute(
        "do $do$ begin execute (select replace(pg_get_functiondef(oid), 'begin', 'begin return;')"
        " from pg_proc where proname = 'payloads_' || (select max(stream_id)"
        " from pgqueue.streams)); end $do$"
    )
    schema.install(conn)
    assert catalogue(conn) == before
    sent = send(conn)
    assert seqs_of(receive(conn)) == [sent]
