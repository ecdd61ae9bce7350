"""What a reader of the archive gets is what was written, or an error: never other messages."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.types.json import Jsonb
from pyarrow import parquet

from spark_pgqueue.archive import layout
from spark_pgqueue.archive.exporter import export
from spark_pgqueue.archive.files import Segment, read
from spark_pgqueue.archive.layout import ArchiveFile
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.conftest import Server, _database
from tests.sql import internals, limits
from tests.sql.queue import Conn, call, consumer, maintain, one, raises, send, send_all, value

COLUMNS = layout.schema("text").names
OF_0_1_0 = ("name", "lo", "hi", "messages", "bytes")
FLIPS = 150


@dataclasses.dataclass
class Archive:
    """A segment of the archive, and what was read from its only file when it was whole.

    And another file of it.
    """

    segment: Segment
    path: Path
    raw: bytes
    rows: list[Any]
    other: bytes

    def read(
        self, lo: int | None = None, hi: int | None = None, segment: Segment | None = None
    ) -> list[Any]:
        """The rows as they are read now."""
        span = (lo or self.segment.lo, hi or self.segment.hi)
        batches = read(segment or self.segment, "text", [span], COLUMNS, None)
        return [row for batch in batches for row in batch.to_pylist()]

    def old(self, **changes: Any) -> Segment:
        """The segment as 0.1.0 noted it, of a file of these bytes."""
        known: dict[str, Any] = self.segment.files[0]._asdict() | {
            "bytes": self.path.stat().st_size
        }
        old = {name: known[name] for name in OF_0_1_0}
        return self.segment._replace(files=(ArchiveFile(**old | changes),))


@pytest.fixture(scope="module")
def written(
    server: Server, template: str, tmp_path_factory: pytest.TempPathFactory
) -> list[Segment]:
    """Two segments: the first has messages with all columns, in a file with several row groups."""
    folder = tmp_path_factory.mktemp("written") / "archive"
    soon = datetime.now(UTC) + timedelta(days=1)
    database = contextmanager(_database)(server, template)
    with database as url, connection.connect(url) as conn, pytest.MonkeyPatch.context() as patch:
        patch.setattr("spark_pgqueue.archive.layout.GROUP_MESSAGES", 20)
        limits.set_constant(conn, "limit_exported", 20)
        value(conn, "create_stream", "s")
        consumer(conn)
        value(conn, "set_archive", "s", str(folder))
        value(conn, "set_retention", "s", p_messages=1, p_unread="drop")
        for n in range(30):
            headers = Jsonb({"a": str(n)})
            send(conn, f"message {n} ü" * (n % 5), p_key=f"key {n % 3}", p_headers=headers)
            send(conn, "plain", p_priority=n, p_deliver_at=soon if n % 4 == 0 else None)
            send_all(conn, ["x", "y"])
            send(conn, "for c", p_consumers=["c"], p_expires_at=soon if n % 3 == 0 else None)
        maintain(conn)
        for _ in range(2):
            send_all(conn, ["z"] * 150)
            maintain(conn)
        export(url)
        rows = call(conn, "archive_files", 1)
        return [Segment.of(row.lo, row.hi, row.uri, row.folder, row.files) for row in rows]


@pytest.fixture
def archive(written: list[Segment], tmp_path: Path) -> Archive:
    """A copy of it, which the test may damage."""
    copy = shutil.copytree(written[0].uri, tmp_path / "archive")
    segment, second = (each._replace(uri=str(copy)) for each in written[:2])
    assert len(segment.files) == 1
    path, other = (copy / each.folder / each.files[0].name for each in (segment, second))
    found = Archive(segment, path, path.read_bytes(), [], other.read_bytes())
    found.rows = found.read()
    assert parquet.read_metadata(path).num_row_groups > 5
    return found


def test_what_was_written_is_read(archive: Archive) -> None:
    assert len(archive.rows) == 150
    assert {row["data"] for row in archive.rows} >= {"plain", "for c", "message 1 ü"}
    assert [row["seq"] for row in archive.read(7, 100)] == list(range(7, 100))
    (file,) = archive.segment.files
    assert file.bytes == len(archive.raw)
    assert file.sha256 == sha256(archive.raw)
    assert file.footer_sha256 == sha256(archive.raw[-file.footer_bytes :])
    assert parquet.read_table(archive.path, page_checksum_verification=True)["seq"].to_pylist() == [
        row["seq"] for row in archive.rows
    ]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.promise("guarantee: Archive", "archive: Flipped bits, and files that are other files")
def test_a_flipped_bit_is_an_error_or_in_what_is_not_read(archive: Archive) -> None:
    """Whichever bit of the file it is."""
    chance = random.Random(7)
    places = [*range(64), *range(8 * len(archive.raw) - 128, 8 * len(archive.raw))]
    places += chance.sample(range(8 * len(archive.raw)), FLIPS)
    middle = [row for row in archive.rows if 50 <= row["seq"] < 60]
    refused = 0
    for place in places:
        flipped = bytearray(archive.raw)
        flipped[place // 8] ^= 1 << place % 8
        archive.path.write_bytes(flipped)
        with pytest.raises(PgQueueError, match=r"is damaged: \d+ bytes from byte \d+") as failed:
            archive.read()
        assert str(archive.path) in str(failed.value)
        try:
            assert archive.read(50, 60) == middle
        except PgQueueError:
            refused += 1
    assert 0 < refused < len(places), "only what is read is looked at"
    archive.path.write_bytes(archive.raw)
    assert archive.read() == archive.rows


def test_a_file_that_is_another_one_is_an_error(archive: Archive) -> None:
    for size in (0, 1, 4, 8, 100, len(archive.raw) // 2, len(archive.raw) - 1):
        archive.path.write_bytes(archive.raw[:size])
        with pytest.raises(PgQueueError, match=f"is damaged: it has {size} bytes"):
            archive.read()
    archive.path.write_bytes(archive.raw + b"\0")
    with pytest.raises(PgQueueError, match="is damaged"):
        archive.read()
    archive.path.write_bytes(archive.other)
    with pytest.raises(PgQueueError, match="is damaged"):
        archive.read()
    archive.path.write_bytes(archive.other[: len(archive.raw)].ljust(len(archive.raw), b"\0"))
    with pytest.raises(PgQueueError, match=r"is damaged: .* do not have the SHA-256"):
        archive.read()
    archive.path.unlink()
    with pytest.raises(FileNotFoundError):
        archive.read()


def test_files_without_digests_are_read_and_their_pages_checked(archive: Archive) -> None:
    """As 0.1.0 noted them, though that wrote no checksums either.

    No flips by chance: pyarrow ends the process at some footers that were damaged.
    """
    assert archive.read(segment=archive.old()) == archive.rows
    group = parquet.read_metadata(archive.path).row_group(3)
    for column in map(group.column, range(group.num_columns)):
        begin = column.dictionary_page_offset or column.data_page_offset
        flipped = bytearray(archive.raw)
        last = begin + column.total_compressed_size - 1  # of its last page, behind the header
        flipped[last] ^= 1
        archive.path.write_bytes(flipped)
        with pytest.raises(PgQueueError, match=r"is damaged: .*CRC checksum"):
            archive.read(segment=archive.old())


Change = Callable[[pa.Table], pa.Table]
COLUMNS_DIFFER = "its columns are not those"

CHANGES: dict[str, tuple[Change, str]] = {
    "lacks a row": (lambda t: t.slice(1), "it has 149 rows, and its manifest says 150"),
    "has none": (lambda t: t.slice(0, 0), "it has 0 rows, and its manifest says 150"),
    "has another order": (lambda t: t.sort_by([("seq", "descending")]), "do not go up from"),
    "has a row twice": (
        lambda t: pa.concat_tables([t.slice(0, 75), t.slice(74, 1), t.slice(76)]),
        "do not go up from",
    ),
    "has a row of another file": (
        lambda t: t.set_column(0, t.schema.field(0), pa.array([*range(1, 150), 9999])),
        "do not go up from",
    ),
    "lacks a column": (lambda t: t.drop_columns(["seq"]), COLUMNS_DIFFER),
    "has another name": (lambda t: t.rename_columns({"seq": "number"}), COLUMNS_DIFFER),
    "has another type": (
        lambda t: t.set_column(0, "seq", t["seq"].cast(pa.int32())),
        COLUMNS_DIFFER,
    ),
    "is of another kind": (
        lambda t: t.set_column(2, layout.schema("binary").field(2), t["data"].cast(pa.binary())),
        "its columns are not those of a stream of kind text",
    ),
}


def test_a_file_of_0_1_0_that_says_something_else_is_refused(archive: Archive) -> None:
    table = parquet.read_table(archive.path).replace_schema_metadata(None)
    for change, (changed, message) in CHANGES.items():
        parquet.write_table(changed(table), archive.path)
        with pytest.raises(PgQueueError, match=message) as failed:
            archive.read(segment=archive.old())
        assert str(archive.path) in str(failed.value), change


def test_a_row_group_without_statistics_is_read(archive: Archive) -> None:
    middle = [row for row in archive.rows if 50 <= row["seq"] < 60]
    table = parquet.read_table(archive.path)
    parquet.write_table(table, archive.path, write_statistics=False, row_group_size=20)
    assert archive.read(segment=archive.old()) == archive.rows
    assert archive.read(50, 60, archive.old()) == middle
    with parquet.ParquetWriter(archive.path, table.schema) as writer:
        for each in (table.slice(0, 0), table):
            writer.write_table(each)
    statistics = parquet.read_metadata(archive.path).row_group(0).column(0).statistics
    assert statistics is None or not statistics.has_min_max
    assert archive.read(50, 60, archive.old()) == middle


@pytest.mark.usefixtures("stream", "allowed_afterwards")
@pytest.mark.promise("archive: Reading back")
def test_what_cannot_be_read_back_does_not_leave_postgres(
    conn: Conn, tmp_path: Path, url: str
) -> None:
    value(conn, "set_archive", "s", str(tmp_path / "archive"))
    value(conn, "set_retention", "s", p_messages=1)
    send_all(conn, ["x"] * 40)
    maintain(conn)
    send(conn)
    for what in ("flipped", "truncated", "gone"):

        def harm(step: str, _: Any, what: str = what) -> None:
            for file in (tmp_path / "archive").rglob("*.parquet") if step == "closed" else ():
                raw = bytearray(file.read_bytes())
                raw[200] ^= 16
                if what == "gone":
                    file.unlink()
                else:
                    file.write_bytes(raw if what == "flipped" else raw[:-1])

        with pytest.raises(PgQueueError, match="was written, but cannot be read back") as failed:
            export(url, on_step=harm)
        assert "Postgres keeps the segment" in str(failed.value), what
        maintain(conn)
        assert one(conn, "select count(*) from pgqueue.messages") == 41
        assert internals.count(conn, "archive_segments") == 0
    assert sum(each.messages for each in export(url)) == 41
    maintain(conn)
    assert one(conn, "select count(*) from pgqueue.messages") == 1


def manifest(conn: Conn) -> tuple[Any, dict[str, Any]]:
    """An attempt to export the first segment, and a file as an exporter would note it."""
    value(conn, "set_archive", "s", "/nowhere")
    value(conn, "set_retention", "s", p_messages=1)
    send_all(conn, ["x"] * 40)
    maintain(conn)
    send(conn)
    (begun,) = call(conn, "begin_export", 1)
    name = f"{begun.attempt}-1.parquet"
    about = ArchiveFile(name, 1, 41, 40, 1000, "0" * 64, 100, "1" * 64)
    return begun.attempt, about._asdict()


NAMES = (
    "", ".", "..", "../../other/1/{}", "/etc/passwd", "x/../{}", "./{}", "{}/", "{}\n", "{} ",
    "..\\{}", "%2e%2e/{}", "{}?x", "{}\u202e", None, 1, [], {"name": "{}"},
    "00000000-0000-0000-0000-000000000000-1.parquet",
)  # fmt: skip
BAD: list[dict[str, Any]] = [
    *({"name": name} for name in NAMES),
    *({key: bad} for key in ("lo", "hi", "messages", "bytes", "footer_bytes")
      for bad in (None, "1", -1, 1.5, 10**30, [])),
    *({key: bad} for key in ("sha256", "footer_sha256")
      for bad in (None, "", "0" * 63, "G" * 64, 0, "a" * 64 + "\n")),
    {"lo": 0}, {"hi": 1}, {"hi": 10**17}, {"messages": 0}, {"messages": 41}, {"footer_bytes": 0},
    {"footer_bytes": 1001}, {"uri": "s3://elsewhere"},
]  # fmt: skip


@pytest.mark.usefixtures("stream", "allowed_afterwards")
@pytest.mark.promise("archive: Prefixes")
def test_files_that_no_exporter_writes_are_not_noted(conn: Conn) -> None:
    """Readers open what is noted: a caller of end_export may not send them elsewhere."""
    attempt, good = manifest(conn)
    name = good["name"]
    for change in BAD:
        if isinstance(change.get("name"), str):
            change = {"name": change["name"].format(name)}
        refused(conn, attempt, [good | change])
    refused(conn, attempt, [good, good])
    refused(conn, attempt, [good, good | {"name": name.replace("-1.", "-2.")}])
    refused(conn, attempt, [good | {"name": name.replace("-1.", "-2.")}])
    for lacking in good:
        refused(conn, attempt, [{key: good[key] for key in good if key != lacking}])
    for other in (None, 1, "x", [], {}):
        refused(conn, attempt, [other])
        refused(conn, attempt, [good, other])
    for other in (None, 1, "x", {}, good):
        refused(conn, attempt, other)
    short = [good | {"messages": 39}]
    with pytest.raises(psycopg.DatabaseError, match="the files contain 39 messages, but segment 1"):
        value(conn, "end_export", attempt, Jsonb(short))
    assert value(conn, "end_export", attempt, Jsonb([good])) == 40


def refused(conn: Conn, attempt: Any, files: Any) -> None:
    with raises("PQ003", "p_files must "):
        value(conn, "end_export", attempt, Jsonb(files))


def test_a_reader_opens_no_file_that_no_exporter_names(archive: Archive) -> None:
    """Also where a manifest of 0.1.0, which took any, has such a name."""
    for name in ("../../x.parquet", "/etc/x.parquet", "", "x", "a/../b.parquet"):
        with pytest.raises(
            PgQueueError, match="is not a name that an exporter gives to a file or folder"
        ):
            archive.read(segment=archive.old(name=name))
    outside = archive.segment._replace(folder="../" + archive.segment.folder)
    with pytest.raises(
        PgQueueError, match="is not a name that an exporter gives to a file or folder"
    ):
        archive.read(segment=outside)


def test_a_link_that_leads_out_of_the_archive_is_not_followed(
    archive: Archive, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere.parquet"
    archive.path.rename(elsewhere)
    archive.path.symlink_to(elsewhere)
    with pytest.raises(PgQueueError, match="leads out of the archive"):
        archive.read()
    archive.path.unlink()
    elsewhere.rename(archive.path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "archive")
    assert archive.read(segment=archive.segment._replace(uri=str(link))) == archive.rows


def test_a_manifest_that_says_something_else_is_an_error_that_names_it(archive: Archive) -> None:
    """Or the same messages are read, where what it says is of no account."""
    (file,) = (each._asdict() for each in archive.segment.files)
    values: list[Any] = [
        *(None, True, -1, 0, 1, 75, 149, 150, 151, 152, 10**6, 2**31, 2**63, -(2**63), 10**30),
        *(1.5, "", "x", "1", "\0", "0" * 64, "A" * 64, [], [1], {}),
    ]
    manifests: list[Any] = [
        *([file | {key: value}] for key in file for value in values),
        *([{key: file[key] for key in file if key != lacking}] for lacking in file),
        *([file | {"more": 1}], [file, file], [file | {"lo": 150}, file], [None], ["x"], [[]], [1]),
        *(None, 1, "x", {}, file),
    ]
    read = 0
    for manifest in manifests:
        said = "archive.rows"
        try:
            segment = Segment.of(*archive.segment[:4], manifest)
            assert archive.read(segment=segment) == archive.rows, manifest
            read += 1
        except PgQueueError as error:
            said = str(error)
        names = ("the manifest of", "is damaged", "is not a name that", "cannot be read", "rows")
        assert any(words in said for words in names), manifest
    # another digest of the whole file, which no reader reads, is of no account
    assert read < 10
