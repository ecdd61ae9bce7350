"""The archive: old messages are in files before they leave Postgres, and no plan changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb
from pyarrow import parquet

from spark_pgqueue.archive.exporter import export
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.schema import grant
from tests.processes import Child
from tests.sql import clock, internals, limits
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

Span = tuple[Any, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The archive's folder."""
    return tmp_path / "archive"


@pytest.fixture
def archive(conn: Conn, stream: int, folder: Path) -> Path:
    """The stream keeps few messages, in segments of two or more; all others go to its archive."""
    value(conn, "set_retention", "s", p_messages=16)
    value(conn, "set_archive", "s", str(folder))
    maintain(conn)
    return folder


def fill(conn: Conn, stream: int, rounds: int = 6) -> list[int]:
    """Publications of all sizes, for all and for one consumer, in many segments.

    Some were rolled back, and some have messages in two segments. Returns the messages for all.
    """
    seqs: list[int] = []
    for i in range(rounds):
        block = stage(conn, stream, 2, batch=i)
        dead_publication(conn)
        seqs.append(send(conn, "x" * i))
        seqs += send_all(conn, ["yy"] * (i % 4 + 1))
        maintain(conn)
        later = stage(conn, stream, 3, batch=i)
        publish(conn, stream, [block, later], 5, batch=i)
        seqs += numbers_of(conn, seqs)
    return sorted(seqs)


def send_in_segments(conn: Conn, times: int = 6) -> list[int]:
    """Messages in so many segments or more; returns their numbers."""
    seqs: list[int] = []
    for _ in range(times):
        seqs += send_all(conn, ["x"] * 4)
        maintain(conn)
    return seqs


def archived_messages(conn: Conn, url: str) -> list[int]:
    """Messages of which most are in the archive alone; returns their numbers."""
    seqs = send_in_segments(conn)
    export(url)
    maintain(conn)
    return seqs


def leave(conn: Conn, stream: int, folder: Path) -> None:
    """An attempt of the stream whose exporter died, in the folder of an archive."""
    conn.execute(
        "insert into pgqueue.archive_attempts (attempt, stream_id, segment, uri, folder)"
        " values (gen_random_uuid(), %s, 99, %s, gen_random_uuid() || '/99')",
        [stream, str(folder)],
    )


def numbers_of(conn: Conn, seqs: list[int]) -> list[int]:
    """The published messages that are not among these."""
    rows = scanned(conn, "messages")
    return [n for row in rows for n in range(row.lo, row.hi) if n not in set(seqs)]


def plan(conn: Conn, span: Span, archive: bool = True) -> list[int]:
    rows = call(conn, "read_plan", "s", *map(Jsonb, span), p_archive=archive)
    return [seq for row in rows for seq in range(row.lo, row.hi)]


def start(conn: Conn, at: str = "earliest", archive: bool = True) -> Any:
    return value(conn, "start_offset", "s", at, archive)


def spans(conn: Conn, size: int, at: str = "earliest") -> Iterator[Span]:
    """What a reader of the archive reads, so many messages at a time."""
    offset = start(conn, at)
    while True:
        end = value(conn, "read_to", "s", Jsonb(offset), size, p_archive=True)
        if end == offset:
            return
        yield offset, end
        offset = end


def read_all(conn: Conn, at: str = "earliest") -> list[int]:
    return [seq for span in spans(conn, 7, at) for seq in plan(conn, span)]


def size_of(conn: Conn, span: Span) -> int:
    return value(conn, "size_between", "s", *map(Jsonb, span), p_archive=True)


def archived(conn: Conn) -> Any:
    """The stream's row in stream_archives."""
    return internals.rows(conn, "select * from pgqueue.stream_archives where stream = 's'")[0]


def held_by(conn: Conn) -> list[str]:
    return one(conn, "select held_by from pgqueue.stream_retention where stream = 's'")


def stored(conn: Conn) -> list[int]:
    return [seq for (seq,) in conn.execute("select seq from pgqueue.messages order by seq")]


def in_files(folder: Path) -> list[int]:
    """The numbers in all files of an archive."""
    files = sorted(folder.rglob("*.parquet"))
    return sorted(seq for each in files for seq in parquet.read_table(each)["seq"].to_pylist())


@pytest.mark.small_limits
@pytest.mark.promise("archive: The same plans before and after")
def test_a_plan_is_the_same_before_and_after_archiving(
    conn: Conn, stream: int, archive: Path, url: str
) -> None:
    consumer(conn)
    want = fill(conn, stream)
    for each in range(20):
        send(conn, "later", p_consumers=["c"]) if each % 3 else want.append(send(conn, "z"))
        if each % 10 == 0:
            maintain(conn)
    chance = random.Random(1)
    noted = [span for size in (1, 3, 1000) for span in spans(conn, size)]
    noted += [
        (chance.choice(noted)[0], end) for _, end in chance.sample(noted, min(40, len(noted)))
    ]
    noted = [(a, b) for a, b in noted if a["next"] <= b["next"] and a["messages"] < b["messages"]]
    before = [(plan(conn, span), size_of(conn, span)) for span in noted]
    assert len(noted) > 50
    acked(conn, "s", "c")
    export(url)
    maintain(conn)
    gone = set(want) - set(stored(conn))
    assert len(gone) > len(want) / 2, "most of it is in files alone"
    assert gone <= set(in_files(archive))
    for span, (seqs, size) in zip(noted, before, strict=True):
        assert plan(conn, span) == seqs
        if "cut" not in span[0] and "cut" not in span[1]:
            assert size_of(conn, span) == size
    assert sorted(read_all(conn)) == sorted(want)


@pytest.mark.promise("guarantee: Archive", "archive: Nothing leaves Postgres first")
def test_nothing_is_trimmed_before_it_is_in_files(conn: Conn, archive: Path, url: str) -> None:
    seqs = send_in_segments(conn, 8)
    assert maintain(conn)["trimmed messages"] == 0
    assert stored(conn) == seqs
    assert held_by(conn) == ["the archive, to which it has not been exported"]
    assert archived(conn).waiting > 3
    export(url)
    assert archived(conn).waiting == 0
    assert archived(conn).messages == len(in_files(archive)) > 20
    assert maintain(conn)["trimmed messages"] > 10
    assert held_by(conn) == []
    assert stored(conn) == seqs[-len(stored(conn)) :]
    assert read_all(conn) == seqs


def test_what_a_consumer_owes_stays_in_postgres_too(conn: Conn, archive: Path, url: str) -> None:
    consumer(conn)
    seqs = archived_messages(conn, url)
    assert stored(conn) == seqs
    assert held_by(conn) == ["consumer c"]
    assert acked(conn, "s", "c") == seqs
    maintain(conn)
    assert len(stored(conn)) < len(seqs)


def test_consumers_and_read_have_what_postgres_stores(conn: Conn, archive: Path, url: str) -> None:
    begun = start(conn, archive=False)
    seqs = send_in_segments(conn, 8)
    (early, _) = next(spans(conn, 4))
    export(url)
    maintain(conn)
    left = stored(conn)
    assert 0 < len(left) < len(seqs)
    consumer(conn)
    assert acked(conn, "s", "c") == left
    assert [row.seq for row in call(conn, "read", "s", None, 100)] == left
    for offset in (begun, early):
        with raises("PQ010", "retention has overtaken") as failed:
            call(conn, "read", "s", Jsonb(offset), 100)
        assert "They are in the archive: Spark reads them" in str(failed.value.diag.message_hint)
    assert start(conn, archive=False) != start(conn)
    said: list[str] = []
    conn.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    value(conn, "replay", "s", "c", "earliest")
    assert len(said) == 1, "of what only the archive has"
    assert said[0].startswith(f"p_from earliest starts with message {left[0]}: ")
    value(conn, "seek", "s", "c", "latest")
    read_all(conn)
    assert len(said) == 1
    with pytest.raises(psycopg.DatabaseError, match="from the first stored message"):
        start(conn, f"seq {seqs[1]}", archive=False)


@pytest.mark.small_limits
def test_each_position_is_found_inside_the_archive(
    conn: Conn, stream: int, archive: Path, url: str, session: Session
) -> None:
    fill(conn, stream, 8)
    moments: list[datetime] = [
        when for (when,) in conn.execute("select published_at from pgqueue.publications order by 1")
    ]
    places = [f"seq {seq}" for seq in stored(conn)[::7]] + [str(each) for each in moments[::6]]
    before = {at: sorted(read_all(conn, at)) for at in places}
    export(url)
    maintain(conn)
    assert len(stored(conn)) < len(read_all(conn)) / 2
    assert {at: sorted(read_all(conn, at)) for at in places} == before
    with session() as other, other.transaction():  # while somebody publishes
        send(other, "open")
        assert {at: sorted(read_all(conn, at)) for at in places} == before
    assert sorted(read_all(conn, "latest")) == []


@pytest.mark.small_limits
def test_an_archive_may_begin_on_a_stream_that_was_trimmed(
    conn: Conn, folder: Path, url: str
) -> None:
    value(conn, "set_retention", "s", p_messages=16)
    (begun, lost) = start(conn), send(conn)
    send_in_segments(conn, 8)
    left = stored(conn)
    assert lost not in left
    value(conn, "set_archive", "s", str(folder))
    more = send_in_segments(conn, 8)
    export(url)
    maintain(conn)
    assert read_all(conn) == left + more
    assert len(stored(conn)) < len(more)
    with raises("PQ010", "retention has overtaken p_offset"):
        value(conn, "read_to", "s", Jsonb(begun), 4, p_archive=True)


def test_a_stream_filled_before_its_first_maintain_goes_into_several_files(
    conn: Conn, stream: int, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_pgqueue.archive.layout.FILE_MESSAGES", 400)
    monkeypatch.setattr("spark_pgqueue.archive.layout.GROUP_MESSAGES", 50)
    limits.set_constant(conn, "limit_exported", 100)
    internals.publish_singly(conn, stream, 1000, "null")
    value(conn, "set_archive", "s", str(folder))
    value(conn, "set_retention", "s", p_messages=1)
    maintain(conn)
    send(conn)
    (done,) = export(url)
    assert (done.messages, done.files) == (1000, 3)
    maintain(conn)
    assert len(stored(conn)) == 1
    assert len(read_all(conn)) == 1001


@pytest.mark.promise("archive: The packed index")
def test_many_publications_are_packed_and_read_as_before(
    conn: Conn, stream: int, folder: Path, url: str
) -> None:
    """A stream of single sends keeps at most 15 bytes for each message, where a row takes 150."""
    limits.set_constant(conn, "limit_packed", 2000)
    internals.publish_singly(conn, stream, 4400, "null")
    value(conn, "set_archive", "s", str(folder))
    value(conn, "set_retention", "s", p_messages=1)
    maintain(conn)
    send(conn)
    noted = list(spans(conn, 850))
    end = noted[-1][1]
    moments = conn.execute(
        "select published_at::text from pgqueue.publications where publication_id % 1000 = 0"
    )
    places = [*(at for (at,) in moments), "seq 1", "seq 2001", "seq 4200"]
    before = [(plan(conn, span), size_of(conn, span)) for span in noted]
    found = {at: plan(conn, (start(conn, at), end)) for at in places}
    last = "select array_agg(l order by l) from _pgqueue.last_readable(1, true, 4004, 9) l"
    nearby = one(conn, last)
    export(url)
    maintain(conn)
    assert len(stored(conn)) == 1
    assert internals.count(conn, "archive_packs") == 2
    assert internals.count(conn, "archive_publications") < 500
    assert one(conn, "select pg_table_size('pgqueue.archive_packs')") < 4400 * 15
    assert [(plan(conn, span), size_of(conn, span)) for span in noted] == before
    assert {at: plan(conn, (start(conn, at), end)) for at in places} == found
    assert one(conn, last) == nearby


def test_two_exporters_write_a_segment_once(conn: Conn, archive: Path, url: str) -> None:
    send_in_segments(conn, 6)
    found: list[Any] = []

    def second(step: str, _: Any) -> None:
        if step == "slice" and not found:
            found.append(export(url))

    done = export(url, on_step=second)
    assert found == [[]], "the second one passes over the stream"
    assert sum(each.messages for each in done) == len(in_files(archive)) > 10
    assert archived(conn).attempts == 0


def test_a_leftover_that_cannot_be_deleted_stops_no_export(
    conn: Conn, stream: int, archive: Path, url: str, tmp_path: Path
) -> None:
    """Such as those in a folder that the archive had before, and the exporter may not open."""
    send_in_segments(conn)
    leave(conn, stream, tmp_path / "old")
    with pytest.raises(PgQueueError, match=r"old is not below"):
        export(url, allow=[str(archive)])
    assert archived(conn).waiting == 0
    assert len(in_files(archive)) > 10
    assert archived(conn).attempts == 1
    assert export(url) == []
    assert archived(conn).attempts == 0


def test_an_error_hides_no_other(
    conn: Conn,
    stream: int,
    archive: Path,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """But leftovers of one archive are one error, however many there are."""
    leave(conn, stream, tmp_path / "old")
    leave(conn, stream, tmp_path / "older")
    leave(conn, stream, tmp_path / "older")
    leave(conn, value(conn, "create_stream", "t"), tmp_path / "others")
    with pytest.raises(PgQueueError, match=r"/old(er)? is not below") as failed:
        export(url, allow=[str(archive)])
    said = [str(failed.value), *(record.getMessage() for record in caplog.records)]
    assert sorted(each.partition(" is not below")[0].rpartition("/")[2] for each in said) == [
        *("old", "older", "others")
    ]
    assert said[1].startswith("the archive of stream s: ")
    assert said[2].startswith("the archive of stream t: ")


def test_no_timeout_of_the_role_ends_an_export(conn: Conn, archive: Path, url: str) -> None:
    """Neither that of a statement, nor that of a transaction, which lasts for a segment."""
    send_in_segments(conn)
    slow = "select replace(pg_get_functiondef('_pgqueue.segment_of'::regproc), %s, %s)"
    text = one(conn, slow, "begin", "begin perform pg_sleep(0.4);")
    conn.execute(text.encode())
    newer = conn.info.server_version >= 170000
    hasty = "-c statement_timeout=300" + " -c transaction_timeout=300" * newer
    done = export(make_conninfo(url, options=hasty))
    assert sum(each.messages for each in done) == len(in_files(archive)) > 10


LONGER = [pytest.param(each, marks=pytest.mark.longer) for each in ("begun", "slice", "exported")]


@pytest.mark.parametrize("step", ["written", *LONGER])
@pytest.mark.promise("guarantee: Archive", "archive: An exporter that dies")
def test_an_exporter_killed_at_any_step_leaves_what_the_next_one_clears(
    conn: Conn, archive: Path, url: str, step: str
) -> None:
    seqs = send_in_segments(conn)
    with Child(
        """
        import os, signal, sys
        from spark_pgqueue.archive.exporter import export

        def on_step(step, about):
            if step == sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL)

        export(sys.argv[1], on_step=on_step)
        """,
        url,
        step,
    ) as child:
        assert child.process.wait(60) == -9
    assert archived(conn).attempts == (step != "exported")
    maintain(conn)
    steps: list[str] = []
    export(url, on_step=lambda step, _: steps.append(step))
    assert ("leftover" in steps) == (step != "exported")
    maintain(conn)
    assert archived(conn).attempts == 0
    assert read_all(conn) == seqs
    files = in_files(archive)
    assert len(files) == len(set(files)) == archived(conn).messages
    assert set(seqs) - set(stored(conn)) <= set(files)


def test_an_exporter_needs_the_role_admin_and_no_other(
    conn: Conn, archive: Path, url: str, writer: Conn
) -> None:
    send_all(conn, ["x"] * 40)
    maintain(conn)
    send(conn)
    maintain(conn)
    user = writer.info.user
    as_user = make_conninfo(url, user=user, password=user)
    with pytest.raises(PgQueueError, match="permission denied"):
        export(as_user)
    grant(conn, "admin", user)
    assert sum(each.messages for each in export(as_user)) >= 40


@pytest.mark.parametrize("of_environment", [False, True])
def test_an_exporter_writes_nowhere_but_where_it_may(
    conn: Conn, archive: Path, url: str, of_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the database says; and no attempt stays that a later run would fail to clear."""
    send_in_segments(conn, 4)
    if of_environment:
        monkeypatch.setenv("PGQUEUE_ARCHIVE_ALLOW", f"s3://bucket/a {archive}-other")
    allow = [] if of_environment else ["s3://bucket/a", f"{archive}-other"]
    for _ in range(2):
        with pytest.raises(PgQueueError, match=r"is not below s3://bucket/a or .*-other, and this"):
            export(url, allow=allow)
    assert archived(conn).attempts == archived(conn).segments == 0
    assert not archive.exists()
    assert export(url, allow=[*allow, str(archive.parent)])


def test_a_late_exporter_cannot_commit_an_attempt_that_was_cleared(
    conn: Conn, archive: Path, url: str
) -> None:
    send_in_segments(conn, 4)

    def cleared(step: str, about: Any) -> None:
        if step == "begun":  # as another exporter does that finds the lock free
            call(conn, "forget_leftover", about.attempt)

    with pytest.raises(PgQueueError, match="another exporter has ended this attempt"):
        export(url, on_step=cleared)
    assert archived(conn).segments == 0
    assert not [*archive.rglob("*.parquet")], "no other exporter would delete them"
    assert [*archive.glob("*/*")], "the other one may be about to write into the folder"


@pytest.mark.small_limits
def test_old_files_leave_the_archive(conn: Conn, archive: Path, url: str) -> None:
    value(conn, "set_archive", "s", str(archive), timedelta(days=30))
    old = send_in_segments(conn)
    (early, _) = next(spans(conn, 4))
    export(url)
    maintain(conn)
    clock.pass_time(conn, timedelta(days=29))
    young = archived_messages(conn, url)
    assert read_all(conn) == old + young
    clock.pass_time(conn, timedelta(days=2))
    maintain(conn)
    left = read_all(conn)
    assert left == (old + young)[-len(left) :]
    assert set(young) <= set(left)
    assert len(left) < len(old + young)
    with raises("PQ010", "retention has overtaken p_offset"):
        value(conn, "read_to", "s", Jsonb(early), 4, p_archive=True)
    assert set(in_files(archive)) > set(left) - set(stored(conn)), "files go last"
    export(url)
    assert set(in_files(archive)) == set(in_files(archive)) & set(left)
    assert archived(conn).attempts == 0


@pytest.mark.small_limits
def test_an_archive_that_ends_keeps_its_files_or_loses_them(
    conn: Conn, archive: Path, url: str
) -> None:
    seqs = archived_messages(conn, url)
    value(conn, "set_archive", "s", None)
    more = send_in_segments(conn)
    assert export(url) == []
    assert held_by(conn) == [], "retention waits for no exporter"
    assert read_all(conn) != seqs + more, "what is trimmed from now on is lost"
    assert read_all(conn)[:8] == seqs[:8]
    value(conn, "drop_archive", "s")
    for uri in (None, str(archive / "new")):
        with raises("PQ006", "still has segments", "p_stream"):
            value(conn, "set_archive", "s", uri)
    maintain(conn)
    assert read_all(conn) == stored(conn)
    export(url)
    assert not list(archive.rglob("*.parquet"))
    assert not internals.rows(conn, "select * from pgqueue.stream_archives")
    assert not internals.count(conn, "archive_publications")
    assert not internals.count(conn, "archive_packs")


def end_during_export(conn: Conn, url: str, function: str, *args: Any) -> None:
    """Export; after the first segment is written, end the archive by a function."""

    def on_step(step: str, _: Any) -> None:
        if step == "written":
            value(conn, function, *args)
            maintain(conn)

    export(url, on_step=on_step)


def test_an_archive_that_is_dropped_during_its_first_export_leaves_nothing(
    conn: Conn, stream: int, archive: Path, url: str
) -> None:
    send_in_segments(conn, 4)
    end_during_export(conn, url, "drop_archive", "s")
    assert internals.count(conn, "archives") == 0
    assert internals.count(conn, "archive_segments") == 1, "which the exporter recorded afterwards"
    assert one(conn, "select max(i) from _pgqueue.on_retain() i") == stream
    maintain(conn)
    export(url)
    assert not list(archive.rglob("*.parquet"))
    for name in ("archive_segments", "archive_attempts", "archive_publications"):
        assert internals.count(conn, name) == 0


def test_an_archive_that_is_stopped_during_its_first_export_keeps_it(
    conn: Conn, archive: Path, url: str
) -> None:
    send_in_segments(conn, 4)
    end_during_export(conn, url, "set_archive", "s", None)
    maintain(conn)
    export(url)
    assert (archived(conn).uri, archived(conn).segments) == (None, 1)
    assert archived(conn).messages == len(in_files(archive)) > 0


def test_a_stream_that_is_being_dropped_gets_no_segment(
    conn: Conn, archive: Path, url: str, session: Session
) -> None:
    """Which no command would remove."""
    send_in_segments(conn, 4)
    with ThreadPoolExecutor(1) as pool, session() as other:
        with other.transaction():
            value(other, "drop_stream", "s")
            exporting = pool.submit(export, url)
            wait_for_a_lock(conn)
        with pytest.raises(PgQueueError, match="its segment is no longer stored"):
            exporting.result(60)
    maintain(conn)
    export(url)
    assert not list(archive.rglob("*.parquet"))
    for name in ("archive_segments", "archive_attempts"):
        assert internals.count(conn, name) == 0


@pytest.mark.small_limits
def test_the_files_of_a_dropped_stream_go(conn: Conn, archive: Path, url: str) -> None:
    archived_messages(conn, url)
    assert in_files(archive)
    value(conn, "drop_stream", "s")
    maintain(conn)
    maintain(conn)
    export(url)
    assert not list(archive.rglob("*.parquet"))
    names = ("attempts", "segments", "publications", "packs")
    for name in ("archives", *(f"archive_{each}" for each in names)):
        assert internals.count(conn, name) == 0
    value(conn, "create_stream", "s")


@pytest.mark.promise("archive: Restores")
def test_after_a_restore_no_file_of_the_time_before_is_deleted(
    conn: Conn, archive: Path, url: str
) -> None:
    seqs = archived_messages(conn, url)
    seqs += send_in_segments(conn)
    call(conn, "begin_export", 1)
    assert archived(conn).attempts == 1
    value(conn, "set_archive", "s", str(archive), timedelta(days=30))
    files = in_files(archive)
    call(conn, "recover")
    assert archived(conn).attempts == 0, "another server may have these files"
    assert read_all(conn) == seqs, "the archive is as good as before"
    clock.pass_time(conn, timedelta(days=31))
    maintain(conn)
    export(url)
    assert files == in_files(archive)[: len(files)]


SECRET = "must not contain a user or a password"
OPTIONS = "must not contain options, with"
PLACE = "must be an absolute path, or a URI such as s3://bucket/path"


NO_FOLDERS = [
    *((f"{scheme}://key:s3cr3t@bucket/path", SECRET) for scheme in ("s3", "S3", "x", "abfss")),
    ("s3://key:s3/cr3t@bucket/path", SECRET),
    ("s3://bucket/path@s3cr3t", SECRET),
    ("s3://bucket/path?access_key=k&secret_key=s3cr3t", OPTIONS),
    ("s3://bucket/path?endpoint_override=s3cr3t.example:80&scheme=http", OPTIONS),
    ("S3://bucket/path?secret_key=s3cr3t", OPTIONS),
    ("gs://bucket?endpoint_override=s3cr3t.example", OPTIONS),
    ("/path?s3cr3t", OPTIONS),
    ("s3://bucket/path#s3cr3t", OPTIONS),
    *((uri, PLACE) for uri in (
        "archive", "", " ", "./a", "~/a", "/", "//a", "///a", "/a//b", "/a/../b", "/a/..",
        "/a/.", "/./a", "/a b", "/a\nb", "/a\tb", "/a\x7f", "/a\\b", "/a%2e", "file://a",
        "file://a/b", "file:/a", "file:////a", "http://host/a", "https://host/a", "mock:///a",
        "ftp://host/a", "S3://bucket/a", "s3:bucket", "s3:///a", "s3://", "s3://bucket//a",
        "s3://bucket/../a", "s3://bucket/%2e%2e/a", "viewfs:///a", "/" + "a" * 1000,
    )),
]  # fmt: skip


def test_what_cannot_be_a_folder_is_refused_and_what_can_is_taken(conn: Conn) -> None:
    """And nothing of a uri that says more than where it is goes into an error, or a log."""
    for uri, message in NO_FOLDERS:
        with raises("PQ003", message) as failed:
            value(conn, "set_archive", "s", uri)
        assert "cr3t" not in str(failed.value)
        assert internals.count(conn, "archives") == 0, uri
    for uri in (
        "/a", "/a/", "/a.b/..c/d@e:f", "file:///a", "s3://bucket", "s3://bucket/a-b/ü", "gs://b/a",
        "gcs://b/a", "abfss://account.blob.core.windows.net/c/a", "hdfs://host:8020/a",
    ):  # fmt: skip
        with conn.transaction(force_rollback=True):
            value(conn, "set_archive", "s", uri)
            assert archived(conn).uri == uri.rstrip("/")


def test_a_stream_without_a_retention_is_told_so(conn: Conn, folder: Path) -> None:
    value(conn, "set_archive", "s", str(folder))
    assert "without a retention, no segment is closed" in archived(conn).advice
    value(conn, "drop_archive", "s")
    maintain(conn)
    assert not internals.count(conn, "archives")


def test_a_read_without_the_archive_does_not_make_its_statements_ready(conn: Conn) -> None:
    """Also where it would not execute them: that took a third of the time of a read."""
    # as functions have it after some calls
    conn.execute("set plan_cache_mode = force_generic_plan")
    for read in ("first_readable(1, $1, 1, 10, 5)", "last_readable(1, $1, 10, 5)",
                 "readable(1, $1, 1, 10)"):  # fmt: skip
        conn.execute(f"prepare reading (boolean) as select * from _pgqueue.{read}".encode())
        plan = conn.execute("explain execute reading (false)", prepare=False).fetchall()
        assert "publications" in str(plan), read
        assert "archive_p" not in str(plan), read
        conn.execute("deallocate reading")
