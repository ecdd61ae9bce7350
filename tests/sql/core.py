"""What consumers hold, as messages, claims, leases and keys: read from the tables of this core.

The oracle (`checker`, `model`, `crossing_*`, the explorer, `owing`) asks here who holds which
message until when, by which claim, and in which state each message is. It names no table that says
so. A core with other tables replaces this file, and `form` with it: that has what else these tables
promise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from tests.sql.form import Tables
from tests.sql.limits import limit

RUNS = """(select * from pgqueue.consumer_messages
union all
select r.* from pgqueue.slots s cross join lateral _pgqueue.runs_of_slot(s) r)"""
"""All runs; slots among them."""

CLAIMS = """(select * from pgqueue.claims
union all
select c.* from pgqueue.slots s cross join lateral _pgqueue.claim_of(s) c
where s.token is not null)"""
"""All claims; claimed slots among them."""

CURSORS = """
select k.consumer_id, k.next_publication, k.gaps, k.take_was_cut, k.last_line_no,
       k.scan_lanes_from, k.pieces_from, k.freed_from, k.waits, k.taken, k.forgotten,
       k.slots_low, k.slots_block, k.slots_from, k.slots_to, k.slots_priority,
       greatest(k.slots_until, '2000-01-01') as slots_until,
       case when tokens_from is not null then greatest(tokens_from, '2000-01-01') end
           as tokens_from,
       g.gap_nos, g.ids as gap_ids, g.total, g.kept, k.filter_from,
       greatest(due_from, '2000-01-01') as due_from, clock_timestamp() as now
from pgqueue.consumer_cursors k cross join lateral (
    select coalesce(array_agg(gap_no), '{}') as gap_nos,
           coalesce(range_agg(publication_ids), '{}') as ids,
           coalesce(range_agg(kept), '{}') as kept,
           coalesce(sum(_pgqueue.cardinality(publication_ids)), 0) as total
    from pgqueue.consumer_gaps x where x.consumer_id = k.consumer_id) g
"""

STORED = ("consumer_messages", "slots")
"""The tables with what consumers hold."""

TABLES = {
    "runs": f"select * from {RUNS} m",
    "claims": f"select *, array(select a.seqs from unnest(acted) a) as acted_seqs from {CLAIMS} l",
    "slots": "select * from pgqueue.slots",
    "pieces": (
        "select consumer_id, place, piece, message_count, arrival_no, first_seq, singly,"
        " keys is null as whole, coalesce(keys, '{}') as keys from pgqueue.pieces"
    ),
    "freed": "select * from pgqueue.freed_keys",
    "tokens": "select * from pgqueue.key_tokens",
    "scan_from": "select consumer_id, (f).* from pgqueue.consumer_cursors, unnest(scan_from) f",
}
"""By attribute of `Tables`, the rows of all consumers."""

LOOK = r"""
do $$
declare
    v_function regproc;
begin
    foreach v_function in array '{_pgqueue.slots_are_next, _pgqueue.claim}'::regproc[] loop
        execute regexp_replace(pg_get_functiondef(v_function),
                               '_pgqueue.need_not_look\((\w+.slots_until)\)',
                               $q$\1 > '-infinity'$q$);
    end loop;
end $$;
create or replace function _pgqueue.need_not_look(p_when timestamptz) returns boolean
language sql volatile as 'select false';
"""
"""Every look is made, also where the clock says that the last one was just now. But a claim that
was made ready ahead is taken for as long as nothing is known to come before it."""


def numbers(multirange: Any) -> set[int]:
    """The elements of an int8multirange."""
    return {n for r in multirange or () for n in range(r.lower, r.upper)}


@dataclass(frozen=True)
class Part:
    """Messages of a consumer that are alike.

    Attributes:
        seqs: their numbers.
        count: how many the core takes them for.
        state: unfiltered, ready, delayed, waiting or claimed.
        arrival: orders messages of a key, before their numbers.
        claim_id: who holds them; None: nobody.
        at_most: how many a claim with one of them may have; None: any number.
        next: whether a claim may take them as they are. By key, no earlier message of their keys
            is anywhere else then, but for what comes `with_` them.
        with_: names what is claimed at once with them; None: nothing.
    """

    seqs: frozenset[int]
    count: int
    state: str
    arrival: int
    claim_id: int | None
    at_most: int | None
    next: bool
    with_: int | None


@dataclass(frozen=True)
class Claim:
    """A claim that is stored.

    Attributes:
        claim_id: its id.
        live: its owner can settle what it holds.
        had: how many messages it had at first.
        holds: how many of them it holds.
        settled: how many its owner settled.
        reader: whose it is; None: a worker's.
        seqs: of a reader, what it had at first.
        acted: of these, what a query has settled by actions, one by one.
    """

    claim_id: int
    live: bool
    had: int
    holds: int
    settled: int
    reader: Any
    seqs: set[int]
    acted: list[int]


@dataclass
class Held:
    """What a consumer holds, and what it has not taken.

    Attributes:
        parts: all that it has taken and is not done with.
        claims: of these messages.
        next_publication: it has taken the publications before this one ...
        gaps: ... but for these.
        kept: of messages in the gaps, those that it has all the same.
        left: how many messages it has taken and holds no more, whatever became of them.
        now: the server's clock.
        tables: what the core's own rules are about, see `form`.
    """

    next_publication: int
    gaps: Any
    kept: set[int]
    left: int
    now: Any
    tables: Tables
    parts: list[Part] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


def read(conn: psycopg.Connection) -> dict[int, Held]:
    """What each consumer holds, by its id, in the connection's transaction."""
    cur: Any = conn.cursor(row_factory=namedtuple_row)
    max_ranges = limit(conn, "ranges", 64)
    held: dict[int, Held] = {}
    for k in cur.execute(CURSORS).fetchall():
        assert k.consumer_id not in held, f"two cursors of consumer {k.consumer_id}"
        held[k.consumer_id] = Held(
            k.next_publication, k.gap_ids, numbers(k.kept), k.taken - k.forgotten, k.now,
            Tables(k, max_ranges),
        )  # fmt: skip
    for name, query in TABLES.items():
        for row in cur.execute(query.encode()).fetchall():
            assert row.consumer_id in held, f"of no consumer: {row}"
            getattr(held[row.consumer_id].tables, name).append(row)
    for each in held.values():
        each.parts = [part_of(run) for run in each.tables.runs]
        each.claims = [
            Claim(
                c.claim_id, c.live, c.message_count, c.remaining, c.settled, c.reader,
                numbers(c.seqs), [s for seqs in c.acted_seqs for s in numbers(seqs)],
            )
            for c in each.tables.claims
        ]  # fmt: skip
    return held


def part_of(run: Any) -> Part:
    """A run, as the oracle knows it."""
    # In the line of those that go by key a dealer comes first, or a claim of all there is.
    next_ = run.state == "ready" and (run.piece is not None or run.lane != 1)
    at_most = (run.note or {}).get("at_most")
    return Part(frozenset(numbers(run.seqs)), run.message_count, run.state, run.arrival_no,
                run.claim_id, at_most, next_, run.piece)  # fmt: skip


# What is asked of it beside a test


def rows(conn: psycopg.Connection, query: str, *args: Any) -> list[Any]:
    """The rows of a query, as named tuples."""
    return conn.cursor(row_factory=namedtuple_row).execute(query.encode(), args or None).fetchall()


def runs(conn: psycopg.Connection) -> list[Any]:
    """All runs with all that is known of them, in an order of their own: to be compared."""
    return rows(conn, f"select m.* from {RUNS} m order by m")


def held_by(conn: psycopg.Connection, claim_id: int) -> list[int]:
    """The messages of a claim, by line, then arrival, then number."""
    found = rows(
        conn,
        f"select s from {RUNS} m, unnest(m.seqs) g,"
        " generate_series(lower(g), upper(g) - 1) s"
        " where claim_id = %s order by lane, arrival_no, s",
        claim_id,
    )
    return [row.s for row in found]


def arrivals(conn: psycopg.Connection, consumer_id: int) -> dict[int, int]:
    """When what a consumer holds was taken, by message: the order of arrival counts up."""
    found = rows(
        conn,
        f"select s, arrival_no from {RUNS} m, unnest(m.seqs) g,"
        " generate_series(lower(g), upper(g) - 1) s where consumer_id = %s",
        consumer_id,
    )
    return {row.s: row.arrival_no for row in found}


def claims(conn: psycopg.Connection) -> list[Any]:
    """The claims that are stored, oldest first: claim_id, live, and seconds that are left."""
    return rows(
        conn,
        "select claim_id, live,"
        " extract(epoch from lease_until - clock_timestamp())::float as seconds_left"
        f" from {CLAIMS} c order by claimed_at, claim_id",
    )


def last_claim(conn: psycopg.Connection, consumer: str) -> int | None:
    """The newest claim of the consumers of this name, without those of `add_in_flight`."""
    (row,) = rows(
        conn,
        f"select (array_agg(claim_id order by claimed_at desc))[1] as claim_id from {CLAIMS} l"
        " join pgqueue.consumers using (consumer_id) where name = %s and claim_id > 0",
        consumer,
    )
    return row.claim_id


# What time and other sessions do to it


def end_lease(conn: psycopg.Connection, *claim_ids: int) -> None:
    """The leases of these claims, or without any of all, ended a second ago."""
    of_all, ids = not claim_ids, list(claim_ids)
    conn.execute(
        "update pgqueue.claims set lease_until = clock_timestamp() - interval '1 s'"
        " where %s or claim_id = any(%s)",
        [of_all, ids],
    )
    conn.execute(
        "update pgqueue.slots set lease_until = clock_timestamp() - interval '1 s'"
        " where token is not null and (%s or _pgqueue.slot_claim(slot, token) = any(%s))",
        [of_all, ids],
    )


def end_delay(conn: psycopg.Connection, seq: int | None = None) -> None:
    """What a message is stored with, or all that is delayed, is due."""
    conn.execute(
        "update pgqueue.consumer_messages set not_visible_until = clock_timestamp()"
        " where not_visible_until is not null and (%s::bigint is null or seqs @> %s::bigint)",
        [seq, seq],
    )


def expire_earlier(conn: psycopg.Connection, by: Any) -> None:
    """The messages that are held expire earlier by so much."""
    conn.execute(
        "update pgqueue.consumer_messages set note = note || jsonb_build_object('expires',"
        " (note ->> 'expires')::bigint - extract(epoch from %s)::bigint)"
        " where note ? 'expires'",
        [by],
    )


def forget_claims(conn: psycopg.Connection) -> None:
    """As if no transaction that claimed had ever been committed; messages stay claimed."""
    conn.execute("delete from pgqueue.claims")
    conn.execute(
        "update pgqueue.slots set token = null, claimed_at = null, lease_until = null,"
        " timeout = null, owner = null"
    )


def lock_messages(conn: psycopg.Connection, seq: int | None = None) -> None:
    """Hold all messages, or what one is stored with, to the end of the transaction."""
    for table in STORED:
        query = f"select from pgqueue.{table} where seqs @> %s::bigint is not false for update"
        conn.execute(query.encode(), [seq])


def lock_claim(conn: psycopg.Connection, claim_id: int) -> bool:
    """Let nobody settle or take over a claim until the end of the transaction: if it is live."""
    slot = conn.execute(
        "select from pgqueue.slots where slot & 1048575 = _pgqueue.place_in(%s)"
        " and token = _pgqueue.token_in(%s) for update",
        [claim_id, claim_id],
    )
    claim = conn.execute(
        "select from pgqueue.claims where claim_id = %s and live for update", [claim_id]
    )
    return slot.rowcount + claim.rowcount > 0
