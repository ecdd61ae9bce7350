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

BUNDLES = """(select b.*, case when token is not null then 'claimed'
    when lane = 1000004 then 'unfiltered'
    when lane = 1000001
         and (key is null or place <= extract(epoch from not_visible_until) * 1000000)
    then 'delayed'
    when lane > 1000000 then 'waiting'
    when exists (select from pgqueue.consumer_messages x where x.bundle_no = b.predecessor
                 and x.bundle_no & 1048575 = b.predecessor & 1048575) then 'waiting'
    else 'ready' end as state,
    coalesce(r.claim_id, (coalesce(b.head, b.bundle_no) & 1048575) << 43 | b.token) as claim_id
from pgqueue.consumer_messages b
left join (select reader, token, claim_id from pgqueue.reader_claims) r using (reader, token)
where b.lane <> 1000005)"""
"""All bundles of messages, with the state of these and the claim that holds them."""

CLAIMS = """(select h.consumer_id, h.claim_id, true as live, h.claimed_at, h.lease_until,
    h.owner, h.reader, h.holds, r.message_count, r.settled, r.seqs, r.settled_early
from (select *, (sum(message_count) over (partition by coalesce(head, bundle_no), token))::bigint
          as holds
      from BUNDLES b where token is not null) h
left join pgqueue.reader_claims r on (r.reader, r.token) = (h.reader, h.token)
where h.head is null
union all
select r.consumer_id, r.claim_id, false, null, null, null, r.reader, 0, r.message_count, r.settled,
    r.seqs, r.settled_early
from pgqueue.reader_claims r
where not exists (select from pgqueue.consumer_messages h
                  where (h.reader, h.token) = (r.reader, r.token)))""".replace("BUNDLES", BUNDLES)
"""All claims: the live ones, and those of readers that are kept."""

CURSORS = """
select k.consumer_id, greatest(k.next_publication, a.last + 1) as next_publication, k.gaps,
       greatest(k.last_arrival, a.place) as last_arrival,
       k.taken + coalesce(a.count, 0) as taken, k.forgotten,
       k.next_publication <= a.first as is_ahead,
       (k.hints).lanes is not null as hinted, (k.hints).lanes_from, (k.hints).filter_from,
       (k.hints).was_cut, (k.hints).any_waiting, (k.hints).all_keys, (k.hints).waits_from,
       (k.hints).free_from,
       array(select key from pgqueue.consumer_messages f where f.consumer_id = k.consumer_id
             and f.lane = 1000005 and f.place >= coalesce((k.hints).freed_from, 0)) as freed,
       coalesce((k.hints).due_from, '9000-01-01') as due_from,
       greatest((k.hints).idle_until, '2000-01-01') as idle_until,
       g.gap_nos, g.ids as stored_ids, g.total, g.kept, clock_timestamp() as now,
       g.ids + coalesce(int8multirange(int8range(k.next_publication, a.last, '[]')) - a.ids, '{}')
           as gap_ids
from pgqueue.consumer_cursors k cross join lateral (
    select coalesce(array_agg(gap_no), '{}') as gap_nos,
           coalesce(range_agg(publication_ids), '{}') as ids,
           coalesce(range_agg(excluded), '{}') as kept,
           coalesce(sum(_pgqueue.cardinality(publication_ids)), 0) as total
    from pgqueue.consumer_gaps x where x.consumer_id = k.consumer_id) g
cross join lateral (
    select min(publication_id) as first, max(publication_id) as last,
           sum(message_count)::bigint as count, max(place) as place,
           range_agg(int8range(publication_id, publication_id, '[]')) as ids
    from pgqueue.taken_ahead x where x.consumer_id = k.consumer_id) a
"""
"""The cursors, as if each were past what was taken ahead of it."""

STORED = ("consumer_messages",)
"""The tables with what consumers hold."""

TABLES = {
    "bundles": (
        f"select *, 'epoch'::timestamptz + place * interval '1 us' as due from {BUNDLES} m"
        " where lane = 1000001 union all"
        f" select *, null from {BUNDLES} m where lane <> 1000001"
    ),
    "claims": (
        f"select *, array(select e.seqs from unnest(settled_early) e) as early_seqs from {CLAIMS} l"
    ),
    "tokens": "select * from pgqueue.key_tokens",
    "ahead": "select * from pgqueue.taken_ahead",
    "lanes": "select consumer_id, (f).* from pgqueue.consumer_cursors, unnest((hints).lanes) f",
}
"""By attribute of `Tables`, the rows of all consumers."""

LOOK = r"""
create or replace function _pgqueue.not_yet(p_when timestamptz) returns boolean
language sql volatile as 'select false';
"""
"""Every look is made, also where the clock says that the last one was just now."""


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
            is anywhere else then.
    """

    seqs: frozenset[int]
    count: int
    state: str
    arrival: int
    claim_id: int | None
    at_most: int | None
    next: bool


@dataclass(frozen=True)
class Claim:
    """A claim that is stored.

    Attributes:
        claim_id: its id.
        live: its owner can settle what it holds.
        had: how many messages it had at first, of a reader.
        holds: how many of them it holds.
        settled: how many its owner settled, of a reader.
        reader: whose it is; None: a worker's.
        seqs: of a reader, what it had at first.
        settled_early: of these, what a query has settled by actions, one by one.
    """

    claim_id: int
    live: bool
    had: int | None
    holds: int
    settled: int | None
    reader: Any
    seqs: set[int]
    settled_early: list[int]


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
        each.parts = [part_of(b) for b in each.tables.bundles if b.message_count > 0]
        each.claims = [
            Claim(
                c.claim_id, c.live, c.message_count, c.holds, c.settled, c.reader,
                numbers(c.seqs), [s for seqs in c.early_seqs for s in numbers(seqs)],
            )
            for c in each.tables.claims
        ]  # fmt: skip
    return held


def part_of(bundle: Any) -> Part:
    """A bundle, as the oracle knows it."""
    # In the line of those that go by key an assigner comes first, or a claim of all there is.
    next_ = bundle.state == "ready" and bundle.lane != 1
    at_most = (bundle.note or {}).get("at_most")
    return Part(frozenset(numbers(bundle.seqs)), bundle.message_count, bundle.state,
                bundle.arrival_no, bundle.claim_id, at_most, next_)  # fmt: skip


# What is asked of it beside a test


def rows(conn: psycopg.Connection, query: str, *args: Any) -> list[Any]:
    """The rows of a query, as named tuples."""
    return conn.cursor(row_factory=namedtuple_row).execute(query.encode(), args or None).fetchall()


def bundles(conn: psycopg.Connection) -> list[Any]:
    """All bundles with all that is known of them, in an order of their own: to be compared."""
    return rows(conn, f"select m.* from {BUNDLES} m order by m")


def held_by(conn: psycopg.Connection, claim_id: int) -> list[int]:
    """The messages of a claim, by arrival, then number."""
    found = rows(
        conn,
        f"select s from {BUNDLES} m, unnest(m.seqs) g,"
        " generate_series(lower(g), upper(g) - 1) s"
        " where claim_id = %s order by arrival_no, s",
        claim_id,
    )
    return [row.s for row in found]


def arrivals(conn: psycopg.Connection, consumer_id: int) -> dict[int, int]:
    """When what a consumer holds was taken, by message: the order of arrival counts up."""
    found = rows(
        conn,
        f"select s, arrival_no from {BUNDLES} m, unnest(m.seqs) g,"
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


def has_all_keys(conn: psycopg.Connection, consumer_id: int) -> bool:
    """Whether a claim may have all keys of a consumer, so that nobody gets the others."""
    found = rows(
        conn,
        "select from pgqueue.consumer_messages where consumer_id = %s and lane = 1000002"
        " and key is null and keys is null",
        consumer_id,
    )
    return bool(found)


def last_claim(conn: psycopg.Connection, consumer: str) -> int | None:
    """The newest claim of the consumers of this name, without those of `add_in_flight`."""
    (row,) = rows(
        conn,
        f"select max(array[extract(epoch from claimed_at), claim_id]) as newest from {BUNDLES} b"
        " join pgqueue.consumers using (consumer_id)"
        " where name = %s and token is not null and head is null and claim_id > 0",
        consumer,
    )
    return row.newest and int(row.newest[1])


# What time and other sessions do to it


def pass_numbers(conn: psycopg.Connection, before: int = 0) -> None:
    """Give the next number, but for so many before, the bits of the last bundle's in ids."""
    conn.execute(
        "select setval('pgqueue.claim_numbers', max(bundle_no) + (1 << 20) - 1 - %s)"
        " from pgqueue.consumer_messages",
        [before],
    )


def bits_in_ids(conn: psycopg.Connection) -> set[int]:
    """The bits of the numbers of all bundles that are in the ids of their claims."""
    return {b.bundle_no & (1 << 20) - 1 for b in bundles(conn)}


def name_as_member(conn: psycopg.Connection, claim_id: int, member_of: int) -> None:
    """As if the first bundle of a claim had been a member of another one before."""
    conn.execute(
        "update pgqueue.consumer_messages h set members = h.members || m.bundle_no"
        f" from {BUNDLES} m where m.claim_id = %s and m.head is null and h.head is null"
        " and h.token = _pgqueue.token_in(%s)".encode(),
        [claim_id, member_of],
    )


def end_lease(conn: psycopg.Connection, *claim_ids: int) -> None:
    """The leases of these claims, or without any of all, ended a second ago."""
    conn.execute(
        "update pgqueue.consumer_messages m set lease_until = clock_timestamp() - interval '1 s',"
        " place = case m.lane when 1000002 then"
        "  (extract(epoch from clock_timestamp() - interval '1 s') * 1000000)::bigint"
        "  else m.place end"
        f" from {BUNDLES} b where b.bundle_no = m.bundle_no and m.lease_until is not null"
        " and (%s or b.claim_id = any(%s))".encode(),
        [not claim_ids, list(claim_ids)],
    )


def end_delay(conn: psycopg.Connection, seq: int | None = None) -> None:
    """What a message is stored with, or all that is delayed, is due."""
    conn.execute(
        "update pgqueue.consumer_messages set not_visible_until = clock_timestamp(),"
        " place = case lane when 1000001 then"
        "  (extract(epoch from clock_timestamp()) * 1000000)::bigint else place end"
        " where not_visible_until is not null and (%s::bigint is null or seqs @> %s::bigint)",
        [seq, seq],
    )


def lock_messages(conn: psycopg.Connection, seq: int | None = None) -> None:
    """Hold all messages, or what one is stored with, to the end of the transaction."""
    conn.execute(
        "select from pgqueue.consumer_messages where seqs @> %s::bigint is not false for update",
        [seq],
    )


def lock_claim(conn: psycopg.Connection, claim_id: int) -> bool:
    """Let nobody settle or take over a claim until the end of the transaction: if it is live."""
    worker = conn.execute(
        "select from pgqueue.consumer_messages where bundle_no & 1048575 = _pgqueue.number_in(%s)"
        " and token = _pgqueue.token_in(%s) and head is null for update",
        [claim_id, claim_id],
    )
    reader = conn.execute(
        "select from pgqueue.reader_claims r join pgqueue.consumer_messages m"
        " on m.bundle_no = r.head and m.token = r.token where r.claim_id = %s for update of m",
        [claim_id],
    )
    return worker.rowcount + reader.rowcount > 0
