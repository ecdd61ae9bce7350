"""The judge of the crossing: compares one snapshot of the queue with the ledger of the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from tests.sql import checker, internals
from tests.sql.core import numbers
from tests.sql.queue import one

BOUND = "a."  # what s has with such a key is copied to t


@dataclass
class Judge:
    """Looks again and again, at a connection that nobody kills."""

    url: str
    looks: int = 0
    # Of copies, which the ledger does not have: by stream and token, the number.
    seqs: dict[tuple[int, str], int] = field(default_factory=dict)

    def look(self, drained: bool = False) -> None:
        """Judge a snapshot; raises AssertionError.

        Args:
            drained: everything was worked off, so what is owed was lost.
        """
        with self.begin() as conn:
            self.judge(conn, drained)
        self.looks += 1

    @contextmanager
    def begin(self) -> Iterator[psycopg.Connection]:
        """A transaction whose snapshot is judged."""
        with psycopg.connect(self.url, application_name="judge") as conn:
            conn.read_only = True
            checker.begin(conn)
            yield conn
            conn.rollback()

    def judge(self, conn: psycopg.Connection, drained: bool = False) -> None:
        consumers = checker.read_here(conn)
        relimited = {row[0] for row in conn.execute("select * from ledger.relimited")}
        late = {row[0] for row in conn.execute("select consumer_id from pgqueue.new_capacities")}
        for c in consumers:
            if c.consumer_id in relimited:
                c.per_key_limit = None
            if c.consumer_id in late:  # the next maintain() enters what is not entered yet
                c.per_key_capacity = None
        checker.check(conn, None, consumers)
        snapshot = Snapshot(conn, self.seqs)
        snapshot.judge_streams()
        for c in consumers:
            if c.consumer_id in snapshot.made:
                snapshot.judge(c, drained)


class Snapshot:
    """What the ledger says, in the snapshot of a connection."""

    def __init__(self, conn: psycopg.Connection, seqs: dict[tuple[int, str], int]):
        self.conn = conn
        self.sent = self.rows("select * from ledger.sent")
        self.made = {m.consumer_id: m for m in self.rows("select * from ledger.made")}
        self.streams = {
            name: stream_id for stream_id, name in self.rows("select stream_id, name from"
                                                             " pgqueue.streams")
        }  # fmt: skip
        self.latest = dict(self.rows("select consumer_id, always from ledger.latest"))
        self.seqs = seqs
        self.messages = self.rows("select stream_id, seq, data from pgqueue.messages")
        copies = Counter((m.stream_id, m.data) for m in self.messages if m.data != "tick")
        twice = [m for m, n in copies.items() if n > 1]
        assert not twice, f"stored twice: {twice[:10]}"
        self.seqs.update({(m.stream_id, m.data): m.seq for m in self.messages})

    def rows(self, query: str, *args: Any) -> list[Any]:
        cur = self.conn.cursor(row_factory=namedtuple_row)
        return cur.execute(query.encode(), args or None).fetchall()

    def all_of(self, stream_id: int) -> list[Any]:
        """What was committed as sent to a stream, or to one that is copied to it."""
        is_target = stream_id == self.streams["t"]
        return [
            m for m in self.sent
            if m.stream_id == stream_id
            or (is_target and m.stream_id == self.streams["s"] and m.consumers is None
                and (m.key or "").startswith(BOUND))
        ]  # fmt: skip

    def tokens(self, stream_id: int) -> set[str]:
        return {m.token for m in self.all_of(stream_id)}

    def of_stream(self, stream_id: int) -> dict[int, Any]:
        """The same by number; of copies only those whose number is known."""
        found = {}
        for m in self.all_of(stream_id):
            is_copy = m.stream_id != stream_id
            seq = self.seqs.get((stream_id, m.token)) if is_copy else m.seq
            if seq is not None:
                found[seq] = m
        return found

    def judge_streams(self) -> None:
        """What was committed is published once, and nothing else is; copies too."""
        for name in ("s", "t"):
            stream_id = self.streams[name]
            published = internals.messages_published(self.conn, stream_id)
            owed = self.of_stream(stream_id)
            stored = {m.seq: m.data for m in self.messages if m.stream_id == stream_id}
            gone = published - stored.keys()
            assert not gone, f"published in {name} and not stored: {sorted(gone)[:20]}"
            more = {s for s in published - owed.keys() if stored[s] != "tick"}
            assert not more, f"published in {name} and not sent: {sorted(more)[:20]}"
            if self.rows("select from pgqueue.trims where stream_id = %s", stream_id):
                continue  # what is not published any more is for each consumer to judge
            lost = owed.keys() - published
            assert not lost, f"sent to {name} and not published: {sorted(lost)[:20]}"
            lost = self.tokens(stream_id) - {m.token for m in owed.values()}
            assert not lost, f"not copied to {name}: {sorted(lost)[:20]}"
        keys = Counter((m.stream_id, m.dedup_key) for m in self.sent if m.dedup_key)
        twice = [key for key, n in keys.items() if n > 1]
        assert not twice, f"a dedup key twice: {twice[:10]}"
        alone = self.rows(
            "select * from ledger.duplicates d where not exists (select from ledger.sent s where"
            " s.stream_id = d.stream_id and s.dedup_key = d.dedup_key)"
        )
        assert not alone, f"duplicates of nothing: {alone[:10]}"

    def visible(self, table: str, column: str, when: str, move: Any) -> set[Any]:
        """What of a table of the ledger was committed before a move, or right after it."""
        query = f"select x.{column} from ledger.{table} x, ledger.moved m where m.no = %s"
        query += f" and pg_visible_in_snapshot(x.xid, m.{when})"
        return {row[0] for row in self.rows(query, move.no)}

    def judge(self, c: checker.Consumer, drained: bool) -> None:
        """Judge a consumer: nothing lost, nothing acknowledged twice, nothing that is not its."""
        made = self.made[c.consumer_id]
        who = f"consumer {made} at {one(self.conn, 'select clock_timestamp()')}"
        of_stream = self.of_stream(c.stream_id)
        its = {s for s, m in of_stream.items() if self.passes(made, m)}
        moves = self.rows("select * from ledger.moved where consumer_id = %s order by no",
                          c.consumer_id)  # fmt: skip
        base = [m for m in moves if m.how != "replay earliest"][-1]
        acked = self.rows("select * from ledger.acked where consumer_id = %s", c.consumer_id)
        before = self.visible("acked", "no", "before", base) if base.how == "seek earliest" else ()
        seen = self.visible("sent", "token", "after", base)
        there = numbers(base.published) if base.how.endswith("earliest") else set()
        must = {s for s in its if s in there or of_stream[s].token not in seen}
        done = {a.seq for a in acked if a.no not in before}
        gone = self.rows("select seq from ledger.gone where consumer_id = %s", c.consumer_id)
        done |= {g.seq for g in gone} | internals.skipped(self.conn, c.consumer_id)
        if c.consumer_id in self.latest:
            done |= replaceable(its, of_stream)
        owed = c.owed
        lost = must - owed - done
        assert not lost, f"lost: {[of_stream[s] for s in sorted(lost)[:10]]}, {who}"
        after = self.visible("acked", "no", "after", moves[-1])
        times = Counter(a.seq for a in acked if a.no not in after)
        twice = [s for s, n in times.items() if n > 1]
        assert not twice, f"acknowledged twice: {sorted(twice)[:20]}, {who}"
        if made.partitions is None:
            again = times.keys() & owed
            assert not again, f"acknowledged, and still there: {sorted(again)[:20]}, {who}"
        delivered = self.rows("select * from ledger.delivered where consumer_id = %s order by no,"
                              " place", c.consumer_id)  # fmt: skip
        delivered = [d for d in delivered if d.token != "tick"]
        tokens = {m.token for m in self.all_of(c.stream_id) if self.passes(made, m)}
        others = {a.token for a in (*delivered, *acked)} - tokens - {"tick"}
        assert not others, f"not its own: {sorted(others)[:20]}, {who}"
        if made.start == "latest" and len(moves) == 1:
            early = self.visible("sent", "token", "before", base) & {d.token for d in delivered}
            assert not early, f"from before its start: {sorted(early)[:20]}, {who}"
        if drained:
            left = owed - set(c.dead) - (done if made.partitions is not None else set())
            assert not left, f"left over: {sorted(left)[:20]}, {who}"
        if len(moves) == 1 and self.latest.get(c.consumer_id):
            self.judge_newest(c.consumer_id, of_stream, delivered)
        if len(moves) == 1 and made.ordering != "none":
            self.judge_order(c.consumer_id, made.ordering, of_stream, delivered, acked)

    def passes(self, made: Any, m: Any) -> bool:
        """Whether a message is for a consumer: by whom it was sent to, and by its filter."""
        if m.consumers is not None:
            is_copy = m.stream_id != made.stream_id
            if is_copy or made.consumer_id not in m.consumers:
                return False
        if made.topic is not None and not (m.key or "").startswith(BOUND):
            return False
        return m.num < made.num_below

    def redriven(self, consumer_id: int) -> set[int]:
        found = self.rows("select seq from ledger.redriven where consumer_id = %s", consumer_id)
        return {row.seq for row in found}

    def judge_order(self, consumer_id: int, ordering: str, of_stream: dict[int, Any],
                    delivered: list[Any], acked: list[Any]) -> None:  # fmt: skip
        """No message came while an earlier one of its key was unsettled, and producers' order."""
        redriven = self.redriven(consumer_id)
        steps = delivered if ordering != "group" else sorted(acked, key=lambda a: a.no)
        settled = {a.seq: a.no for a in acked}
        lines: dict[Any, dict[int, set[int]]] = defaultdict(dict)  # by key, in which claims it was
        for d in steps:
            m = of_stream.get(d.seq)
            if m is None or d.seq in redriven or (m.key is None and ordering != "stream"):
                continue
            line = lines["" if ordering == "stream" else m.key]
            if ordering != "group":
                self.judge_step(line, d, settled, consumer_id)
            line.setdefault(d.seq, set()).add(d.claim_id)
        for key, line in lines.items():
            last: dict[int, Any] = {}
            for m in map(of_stream.__getitem__, line):
                if not m.late:
                    before = last.get(m.producer)
                    assert before is None or m.n > before.n, (
                        f"consumer {consumer_id}, {ordering}, key {key!r}: {before} before {m}"
                    )
                    last[m.producer] = m

    def judge_newest(self, consumer_id: int, of_stream: dict[int, Any],
                     delivered: list[Any]) -> None:  # fmt: skip
        """Where the latest wins, the messages of a key come with rising numbers."""
        redriven = self.redriven(consumer_id)
        newest: dict[str, int] = {}
        seen: set[int] = set()
        for d in delivered:
            m = of_stream.get(d.seq)
            if m is None or m.key is None or d.seq in redriven or d.seq in seen:
                continue
            seen.add(d.seq)
            before = newest.get(m.key, 0)
            assert before < d.seq, f"consumer {consumer_id}, key {m.key!r}: {d} came after {before}"
            newest[m.key] = d.seq

    @staticmethod
    def judge_step(
        line: dict[int, set[int]], d: Any, settled: dict[int, int], consumer_id: int
    ) -> None:
        """What is before a delivery in its line was settled, or is in the same claim."""
        before = list(line)
        if d.seq in line:
            before = before[: before.index(d.seq)]
        for seq in before[-200:]:
            assert settled.get(seq, 0) <= d.no or d.claim_id in line[seq], (
                f"consumer {consumer_id}: {d} came before {seq}, which was settled at"
                f" {settled[seq]}, and was in the claims {line[seq]}"
            )


def replaceable(its: set[int], of_stream: dict[int, Any]) -> set[int]:
    """Of the messages of a consumer those that have a newer one of their key."""
    newest: dict[str, int] = {}
    for seq in its:
        key = of_stream[seq].key
        newest[key] = max(seq, newest.get(key, 0))
    return {s for s in its if of_stream[s].key is not None and s < newest[of_stream[s].key]}
