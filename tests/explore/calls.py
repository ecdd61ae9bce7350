"""The calls that sessions make: the public functions that write, and what they do to the promises.

`CALLS` names them; a call takes its values from the `Case`, and tells the case's ledger what it
returned, once that is committed. `NOT_CALLED` says why the other functions are not here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.explore.cases import Case


@dataclass(frozen=True)
class Kind:
    """A call that a case may make, and what it may do to the promises."""

    text: str  # {stream} and {stream_id} are the case's
    values: Callable[[Case, int], list[Any]]
    note: Callable[[Case, int, list[Any]], None] | None = None
    needs: str = ""  # what the case has to have before it begins, see `Case.prepare`
    drops: bool = False  # messages may go that nobody acknowledged
    repeats: bool = False  # acknowledged messages may come again
    reorders: bool = False
    frees: bool = False  # messages of open claims may be delivered again
    acts: bool = False  # it settles messages that others hold
    ends: bool = False  # what reads by offset is gone
    sends_unseen: bool = False  # it does not say which messages it sent

    @property
    def functions(self) -> set[str]:
        return set(re.findall(r"\bpgqueue\.(\w+)\(", self.text))


# Values


def stream(case: Case, actor: int) -> list[Any]:
    return [case.stream]


def nothing(case: Case, actor: int) -> list[Any]:
    return []


def claim(case: Case, actor: int) -> list[Any]:
    return [case.claims.get(actor, (0, []))[0]]


def claim_and_one(case: Case, actor: int) -> list[Any]:
    claim_id, seqs = case.claims.get(actor, (0, [0]))
    return [claim_id, seqs[:1]]


def stream_and_claim(case: Case, actor: int) -> list[Any]:
    return [case.stream, *claim(case, actor)]


def stream_and_seqs(case: Case, actor: int) -> list[Any]:
    return [case.stream, case.seqs[1:3]]


def both_streams(case: Case, actor: int) -> list[Any]:
    return [case.stream, case.stream + "_other"]


def table(case: Case, actor: int) -> list[Any]:
    return [f"public.{case.stream}", case.stream]


def worker(case: Case, actor: int) -> list[Any]:
    return [case.stream, f"worker{actor}"]


def leases(case: Case, actor: int) -> list[Any]:
    return [case.stream, case.leases.get(actor, [])]


def lease_ids(case: Case, actor: int) -> list[Any]:
    return [case.leases.get(actor, [])]


def done_offsets(case: Case, actor: int) -> list[Any]:
    last = {row.lease_id: row.next_offset for row in case.reads.get(actor, [])}
    return [list(last), [o[0] for o in last.values()], [o[1] for o in last.values()]]


def offset(case: Case, actor: int) -> list[Any]:
    found = case.offsets.get(actor)
    return [case.stream, None if found is None else json.dumps(found)]


def reader(case: Case, actor: int) -> list[Any]:
    mine = case.reader(actor)
    return [mine.id, case.consumer_id, *mine.start]


def next_of_reader(case: Case, actor: int) -> list[Any]:
    mine = case.reader(actor)
    return [mine.id, case.consumer_id, *mine.end]


def finished(case: Case, actor: int) -> list[Any]:
    return next_of_reader(case, actor)[:3]


def unfinished(case: Case, actor: int) -> list[Any]:
    return reader(case, actor)[:3]


def planned(case: Case, actor: int) -> list[Any]:
    mine = case.reader(actor)
    return [mine.id, case.consumer_id, mine.start[0], mine.end[0], mine.id]


def reader_id(case: Case, actor: int) -> list[Any]:
    return [case.reader(actor).id]


def staged(case: Case, actor: int) -> list[Any]:
    chunks = case.staged.get(-1, {})
    return [case.sink, case.stream_id, list(chunks), sum(map(len, chunks.values()))]


def staged_here(case: Case, actor: int) -> list[Any]:
    chunks = case.staged.get(actor, {})
    return [f"{case.sink}{actor}", case.stream_id, list(chunks), sum(map(len, chunks.values()))]


def staged_ids(case: Case, actor: int) -> list[Any]:
    return [case.sink, list(case.staged.get(-1, {}))]


def stage_sink(case: Case, actor: int) -> list[Any]:
    return [f"{case.sink}{actor}"]


def settle_first(case: Case, actor: int) -> list[Any]:
    return [case.sink, action(case, "ack", case.seqs[:1])]


def settle_others(case: Case, actor: int) -> list[Any]:
    actions = [action(case, "nack", case.seqs[:1]), action(case, "dead_letter", case.seqs[1:2])]
    return [f"{case.sink}{actor}", f"[{','.join(a[1:-1] for a in actions)}]"]


def revived(case: Case, actor: int) -> list[Any]:
    return [case.sink, action(case, "redrive", case.seqs[:1])]


def action(case: Case, what: str, seqs: list[int]) -> str:
    ranges = "{" + ",".join(f"[{seq},{seq + 1})" for seq in seqs) + "}"
    return json.dumps([{"action": what, "stream": case.stream, "consumer": "c", "seqs": ranges}])


# What the ledger is told


def note_sent(case: Case, actor: int, rows: list[Any]) -> None:
    case.ledger.sent |= {row[0] for row in rows if row[0] is not None}


def note_captured(case: Case, actor: int, rows: list[Any]) -> None:
    """A trigger has sent what was written, if the table was captured then."""
    case.ledger.sent |= {row.seq for row in case.read_all() if "table" in (row.headers or {})}


def note_received(case: Case, actor: int, rows: list[Any]) -> None:
    case.ledger.see(rows)
    if rows:
        seqs = [row.seq for row in rows]
        case.claims[actor] = rows[0].claim_id, seqs
        case.ledger.taken.append(set(seqs))


def note_acked(case: Case, actor: int, rows: list[Any]) -> None:
    held = case.claims.get(actor, (0, []))[1]  # nothing, if there was nothing to receive
    case.ledger.settle(set(held), rows[0][0], case.may("drops") or case.may("acts"))


def note_acked_one(case: Case, actor: int, rows: list[Any]) -> None:
    if rows[0][0]:
        case.ledger.acked.update(case.claims[actor][1][:1])


def note_extended(case: Case, actor: int, rows: list[Any]) -> None:
    if rows[0][0]:
        case.ledger.extended |= set(case.claims[actor][1])


def note_next(case: Case, actor: int, rows: list[Any]) -> None:
    """What the claim before held is acknowledged, unless it was lost: the call does not say so."""
    held = set(case.claims.pop(actor, (0, []))[1])
    if case.beside == "expiry" or case.may("frees") or case.may("acts"):
        case.ledger.unsure |= held
    else:
        case.ledger.acked.update(held)
    note_received(case, actor, rows)


def note_reader_claim(case: Case, actor: int, rows: list[Any]) -> None:
    mine = case.reader(actor)
    again = mine.end != mine.start
    (row,) = rows
    if row.claim_id == mine.start[0]:
        return
    assert not again or mine.end[0] == row.claim_id, "the same start gave another batch"
    mine.end = row.claim_id, row.messages
    held = case.plan(mine)
    if not again:
        mine.held = held
        case.ledger.taken.append(held)


def note_reader_acked(case: Case, actor: int, rows: list[Any]) -> None:
    mine, (row,) = case.reader(actor), rows
    may_miss = case.may("drops") or case.may("acts") or case.may("frees") or row.lost > 0
    case.ledger.settle(mine.held, row.acked - row.lost, may_miss)
    mine.start, mine.held = mine.end, set()


def note_reader_next(case: Case, actor: int, rows: list[Any]) -> None:
    mine, (row,) = case.reader(actor), rows
    if row.lost or case.may("frees") or case.may("acts") or case.may("drops"):
        case.ledger.unsure |= mine.held
    else:
        case.ledger.acked.update(mine.held)
    mine.start, mine.held = mine.end, set()
    note_reader_claim(case, actor, rows)


def note_resumed(case: Case, actor: int, rows: list[Any]) -> None:
    case.reader(actor).held |= case.plan(case.reader(actor))


def note_staged(case: Case, actor: int, rows: list[Any]) -> None:
    (row,) = rows
    case.staged[actor] = {row.staged_id: row.seqs}


def note_published(case: Case, actor: int, rows: list[Any]) -> None:
    if rows[0][0]:
        case.published += 1
        assert case.published == 1, "a batch was published twice"
        case.ledger.sent |= {seq for seqs in case.staged[-1].values() for seq in seqs}


def note_published_here(case: Case, actor: int, rows: list[Any]) -> None:
    if rows[0][0]:
        case.ledger.sent |= {seq for seqs in case.staged.get(actor, {}).values() for seq in seqs}


def note_settled(case: Case, actor: int, rows: list[Any]) -> None:
    (row,) = rows
    if row.done and row.changed:
        case.ledger.acked.update(case.seqs[:1])


def note_leases(case: Case, actor: int, rows: list[Any]) -> None:
    case.leases[actor] = [row.lease_id for row in rows]


def note_group_read(case: Case, actor: int, rows: list[Any]) -> None:
    case.reads[actor] = rows


def note_group_committed(case: Case, actor: int, rows: list[Any]) -> None:
    read = case.reads.pop(actor, [])
    case.group_done += [(row.partition, row.seq) for row in read if row.seq is not None]


def note_read(case: Case, actor: int, rows: list[Any]) -> None:
    case.seen[actor] += [row.seq for row in rows]
    if rows:
        case.offsets[actor] = rows[-1].next_offset


# A task writes in one statement what it publishes or stages in the next: here both are one call.
HELPERS = """
create function explore.write(p_stream_id int, out seqs int8multirange, out numbers bigint[])
language plpgsql as $$
begin
    seqs := pgqueue.reserve(p_stream_id, 2);
    numbers := array(select n from unnest(seqs) g,
                     generate_series(lower(g), upper(g) - 1) n order by 1);
    insert into pgqueue.written (seq, stream_id, key, data)
    values (numbers[1], p_stream_id, 'a', 'w'), (numbers[2], p_stream_id, 'b', 'w');
end $$;
create function explore.publish(p_stream text, p_stream_id int) returns setof bigint
language plpgsql as $$
declare
    v_written record := explore.write(p_stream_id);
begin
    perform pgqueue.publish_written(p_stream, v_written.seqs);
    return query select unnest(v_written.numbers);
end $$;
create function explore.stage(p_sink text, p_stream_id int, p_write_no bigint, out staged_id bigint,
                              out seqs bigint[])
language plpgsql as $$
declare
    v_written record := explore.write(p_stream_id);
begin
    staged_id := pgqueue.stage(p_sink, 0, p_stream_id, v_written.seqs,
                               p_write_no => p_write_no);
    seqs := v_written.numbers;
end $$;
"""

CALLS = {
    # publishing
    "send": Kind("select pgqueue.send(%s, 'y', p_key => 'a')", stream, note_sent),
    "send_batch": Kind(
        "select * from pgqueue.send_batch(%s, array['y', 'z', 'y'], array['a', 'b', 'a'])",
        stream, note_sent,
    ),
    "send_delayed": Kind(
        "select pgqueue.send(%s, 'y', p_key => 'a', p_deliver_at => now() + interval '1 hour')",
        stream, note_sent,
    ),
    "send_once": Kind(
        "select pgqueue.send(%s, 'y', p_key => 'a', p_dedup_key => 'once')", stream, note_sent,
        needs="window",
    ),
    "send_urgent": Kind(
        "select pgqueue.send(%s, 'y', p_key => 'a', p_priority => 2)", stream, note_sent
    ),
    "publish_written": Kind(
        "select * from explore.publish(%s, {stream_id}) /* pgqueue.publish_written() */",
        stream, note_sent,
    ),
    # claiming
    "receive": Kind("select * from pgqueue.receive(%s, 'c', 1)", stream, note_received),
    "receive_two": Kind("select * from pgqueue.receive(%s, 'c', 2)", stream, note_received),
    "receive_all": Kind("select * from pgqueue.receive(%s, 'c', 10)", stream, note_received),
    "receive_next": Kind(
        "select * from pgqueue.receive(%s, 'c', 1, p_ack => %s)", stream_and_claim, note_next,
        needs="claim",
    ),
    "receive_where": Kind(
        "select * from pgqueue.receive_where(%s, 'c', '$.key == \"b\"', 2)", stream, note_received
    ),
    # settling
    "ack": Kind("select pgqueue.ack(%s)", claim, note_acked, needs="claim"),
    "ack_one": Kind("select pgqueue.ack(%s, %s)", claim_and_one, note_acked_one, needs="claim"),
    "nack": Kind("select pgqueue.nack(%s)", claim, needs="claim", frees=True),
    "nack_later": Kind(
        "select pgqueue.nack(%s, p_delay => '1 hour')", claim,
        needs="claim", frees=True, reorders=True,
    ),
    "nack_one": Kind("select pgqueue.nack(%s, %s)", claim_and_one, needs="claim", frees=True),
    "defer": Kind("select pgqueue.defer(%s)", claim, needs="claim", frees=True, reorders=True),
    "extend": Kind("select pgqueue.extend(%s, '1 hour')", claim, note_extended, needs="claim"),
    "dead_letter": Kind("select pgqueue.dead_letter(%s)", claim, needs="claim"),
    # those that are not delivered
    "retry": Kind("select pgqueue.retry(%s, 'c')", stream, reorders=True),
    "cancel": Kind("select pgqueue.cancel(%s, 'c', %s)", stream_and_seqs, drops=True),
    "postpone": Kind(
        "select pgqueue.postpone(%s, 'c', %s, '2020-01-01')", stream_and_seqs, reorders=True
    ),
    "redrive": Kind(
        "select pgqueue.redrive(%s, 'c')", stream, needs="dead", reorders=True
    ),
    "purge_dead": Kind("select pgqueue.purge_dead(%s, 'c')", stream, needs="dead", drops=True),
    # a consumer
    "seek_earliest": Kind(
        "select pgqueue.seek(%s, 'c', 'earliest')", stream, repeats=True, frees=True, reorders=True
    ),
    "seek_latest": Kind(
        "select pgqueue.seek(%s, 'c', 'latest')", stream, drops=True, frees=True, reorders=True
    ),
    "replay": Kind(
        "select pgqueue.replay(%s, 'c', 'earliest')",
        stream, repeats=True, frees=True, reorders=True,
    ),
    "pause": Kind("select pgqueue.pause(%s, 'c')", stream),
    "resume": Kind("select pgqueue.resume(%s, 'c')", stream, needs="paused"),
    "alter_limits": Kind(
        "select pgqueue.alter_consumer(%s, 'c', '{\"max_backlog\": 100, \"max_in_flight\": 1}')",
        stream,
    ),
    "alter_full": Kind(
        "select pgqueue.alter_consumer(%s, 'c',"
        " '{\"max_backlog\": 2, \"on_full\": \"drop_oldest\"}')",
        stream, drops=True,
    ),
    "alter_fair": Kind(
        "select pgqueue.alter_consumer(%s, 'c', '{\"per_key_limit\": 1}')", stream, reorders=True
    ),
    "alter_capacity": Kind(
        "select pgqueue.alter_consumer(%s, 'c', '{\"per_key_capacity\": 2}')", stream
    ),
    "create_consumer": Kind("select pgqueue.create_consumer(%s, 'd', 'earliest')", stream),
    "create_latest": Kind("select pgqueue.create_consumer(%s, 'd', 'latest')", stream),
    "drop_consumer": Kind(
        "select pgqueue.drop_consumer(%s, 'c')", stream, drops=True, frees=True
    ),
    # a stream
    "create_stream": Kind(
        "select pgqueue.create_stream('{stream}_new', p_if_not_exists => true)", nothing
    ),
    "alter_stream": Kind(
        "select pgqueue.alter_stream(%s, '{\"max_bytes\": 100, \"dedup_window\": \"1 hour\"}')",
        stream,
    ),
    "set_retention": Kind(
        "select pgqueue.set_retention(%s, p_messages => 1)", stream
    ),
    "set_archive": Kind("select pgqueue.set_archive(%s, '/nowhere')", stream),
    "drop_archive": Kind("select pgqueue.drop_archive(%s)", stream, needs="archive"),
    "bind": Kind("select pgqueue.bind(%s, '*', %s)", both_streams, needs="other"),
    "unbind": Kind("select pgqueue.unbind(%s, '*', %s)", both_streams, needs="bound"),
    "drop_stream": Kind(
        "select pgqueue.drop_stream(%s)", stream, drops=True, frees=True, ends=True
    ),
    "maintain": Kind("select * from pgqueue.maintain()", nothing),
    "maintain_staged": Kind("select * from pgqueue.maintain('1 us')", nothing),
    "recover": Kind("select * from pgqueue.recover()", nothing),
    # schedules
    "create_schedule": Kind(
        "select pgqueue.create_schedule(%s, 't', p_every => interval '1 hour', p_data => 'tick',"
        " p_replace => true)",
        stream, needs="schedule", sends_unseen=True,
    ),
    "drop_schedule": Kind(
        "select pgqueue.drop_schedule(%s, 't')", stream, needs="schedule", sends_unseen=True
    ),
    "pause_schedule": Kind(
        "select pgqueue.pause_schedule(%s, 't')", stream, needs="schedule", sends_unseen=True
    ),
    "resume_schedule": Kind(
        "select pgqueue.resume_schedule(%s, 't')", stream, needs="schedule", sends_unseen=True
    ),
    # a captured table
    "capture": Kind("select pgqueue.capture(%s, %s)", table, needs="table"),
    "release": Kind("select pgqueue.release(%s, %s)", table, needs="captured"),
    "write_captured": Kind(
        "insert into {stream} (x) values ('t') /* pgqueue.send_captured() */ -- lock: captured",
        nothing, note_captured, needs="table",
    ),
    # those who read by offset
    "read": Kind("select * from pgqueue.read(%s, %s, 2)", offset, note_read, needs="offset"),
    "note_offset": Kind(
        "select pgqueue.note_offset(%s, 'o', pgqueue.start_offset(%s, 'latest'))",
        lambda case, _: [case.stream, case.stream], needs="offset group",
    ),
    # a group
    "create_group": Kind("select pgqueue.create_group(%s, 'h', 2)", stream),
    "lease_partitions": Kind(
        "select * from pgqueue.lease_partitions(%s, 'g', %s)", worker, note_leases, needs="group"
    ),
    "read_partitions": Kind(
        "select * from pgqueue.read_partitions(%s, 'g', %s, 2)", leases, note_group_read,
        needs="leases",
    ),
    "commit_offset": Kind(
        "select pgqueue.commit_offset(l, array[n, s]) from unnest(%s::bigint[], %s::bigint[],"
        " %s::bigint[]) u (l, n, s)",
        done_offsets, note_group_committed, needs="read",
    ),
    "release_partitions": Kind(
        "select pgqueue.commit_offset(l, null, true) from unnest(%s::bigint[]) l", lease_ids,
        needs="leases",
    ),
    "leave_group": Kind("select pgqueue.leave_group(%s, 'g', %s)", worker, needs="leases"),
    # Spark's source
    "reader_claim": Kind(
        "select * from pgqueue.reader_claim(%s, %s, %s, %s, 2)", reader, note_reader_claim,
        needs="reader",
    ),
    "reader_next": Kind(
        "select * from pgqueue.reader_claim(%s, %s, %s, %s, 1)", next_of_reader, note_reader_next,
        needs="batch",
    ),
    "reader_ack": Kind(
        "select * from pgqueue.reader_ack(%s, %s, %s)", finished, note_reader_acked, needs="batch"
    ),
    "reader_resume": Kind(
        "select * from pgqueue.reader_resume(%s, %s, %s, %s, %s)", planned, note_resumed,
        needs="batch",
    ),
    "reader_cut": Kind(
        "select * from pgqueue.reader_resume(%s, %s, %s, %s, gen_random_uuid(), 1)",
        lambda case, actor: planned(case, actor)[:4],
        needs="batch", frees=True, reorders=True,
    ),
    "reader_extend": Kind("select pgqueue.reader_extend(%s)", reader_id, needs="batch"),
    "reader_release": Kind(
        "select * from pgqueue.reader_release(%s, %s, %s)", unfinished, needs="resting",
        frees=True,
    ),
    "reader_fork": Kind("select pgqueue.reader_fork(%s, %s, %s, %s)", reader, needs="batch"),
    "reader_query": Kind("select pgqueue.reader_query(%s, 'query')", reader_id, needs="batch"),
    # Spark's sink
    "stage": Kind(
        "select * from explore.stage(%s, {stream_id}, pgqueue.begin_write())"
        " /* pgqueue.reserve() pgqueue.stage() */",
        stage_sink, note_staged, needs="sink",
    ),
    "stage_again": Kind(  # a later write of the common batch: it deletes what that has staged
        "select * from explore.stage(%s, {stream_id}, pgqueue.begin_write())"
        " /* pgqueue.reserve() pgqueue.stage() */",
        lambda case, _: [case.sink], needs="staged",
    ),
    "publish_here": Kind(
        "select pgqueue.publish_staged(%s, 0, %s, %s, %s)", staged_here, note_published_here,
        needs="sink",
    ),
    "publish_staged": Kind(
        "select pgqueue.publish_staged(%s, 0, %s, %s, %s)", staged, note_published, needs="staged"
    ),
    "unstage": Kind("select pgqueue.unstage(%s, 0, %s)", staged_ids, needs="staged"),
    "settle_messages": Kind(
        "select * from pgqueue.settle_messages(%s, 0, %s)", settle_first, note_settled, acts=True
    ),
    "settle_others": Kind(
        "select * from pgqueue.settle_messages(%s, 0, %s)", settle_others, acts=True, frees=True,
        reorders=True,
    ),
    "revive_messages": Kind(
        "select * from pgqueue.revive_messages(%s, 0, %s)", revived, needs="dead", reorders=True
    ),
}  # fmt: skip

# What a session does one after the other: + in two transactions, & in one.
PROGRAMS = [
    "send+send",
    "send&send_batch",
    "send+receive_all+ack+receive",
    "receive+ack",
    "ack&receive+ack",
    "receive+nack+receive_two+ack",
    "receive_all+ack_one+nack",
    "receive+receive_next+ack",
    "receive+extend+dead_letter",
    "redrive+receive+ack",
    "pause+resume",
    "seek_earliest+receive",
    "bind+send+unbind",
    "capture+write_captured+release",
    "read+read",
    "lease_partitions+read_partitions+commit_offset+leave_group",
    "reader_claim+reader_resume+reader_ack",
    "reader_claim+reader_next+reader_ack",
    "stage+publish_here",
    "publish_staged&settle_messages",
    "set_retention+maintain",
]

# Public volatile functions that no case calls by name, and why.
CALLED_BY_ANOTHER = {
    "claim": "receive",
    "read_to": "read",
    "plan_partitions": "read_partitions",
    "change_capture": "capture",
    "note_captures": "capture",
    "execute_as": "capture",
    "send_captured": "write_captured",
    "maintain_all": "maintain",
}
WRITES_NOTHING = {
    "start_offset", "end_offset", "end_after", "read_plan", "offset_lag", "size_between",
    "peek_at", "was_truncated", "still_publishing", "begin_write_of",
}  # fmt: skip
OF_A_SESSION = {"start_waiting", "stop_waiting", "listen_done"}  # they write nothing, but listen
OF_TABLES = {
    "open_table",
    "open_table_write",
    "begin_table_batch",
    "apply_table_batch",
    "drop_table_write",
}  # they touch no message; tests/sql/test_table_sink.py lets them meet each other
# Files are written between them: sql/test_archive.py kills exporters at each step.
OF_AN_EXPORTER = {"lock_export", "begin_export", "end_export", "forget_leftover"}
OF_THE_SERVER = {"create_roles"}  # roles belong to all databases of the server
