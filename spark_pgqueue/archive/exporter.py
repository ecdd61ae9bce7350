"""The exporter: it writes the closed segments of streams to the files of their archives.

`sql/archive/export.sql` describes the steps, and the state that a crash leaves after each of them.
The transaction with the export lock has a separate connection. It holds no snapshot, so VACUUM can
remove old rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg.types.json import Jsonb

from spark_pgqueue.archive import layout
from spark_pgqueue.archive.files import verify
from spark_pgqueue.archive.folders import check, folder
from spark_pgqueue.archive.layout import ArchiveFile
from spark_pgqueue.postgres.adbc import call, kept_connection, let_go
from spark_pgqueue.postgres.connection import NO_TIMEOUTS
from spark_pgqueue.postgres.errors import PgQueueError, translated
from spark_pgqueue.postgres.payloads import expression, headers_map, set_up
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi


@dataclass(frozen=True)
class Exported:
    """A segment that is in the archive now.

    Attributes:
        stream: the stream's name.
        segment: the segment's number.
        messages: how many messages it has.
        files: in how many files they are.
        bytes: the size of the files.
    """

    stream: str
    segment: int
    messages: int
    files: int
    bytes: int


class _Attempt(NamedTuple):
    """What `pgqueue.begin_export` returns."""

    attempt: Any
    segment: int
    uri: str
    folder: str
    kind: str


def export(
    url: str | None,
    options: Mapping[str, Any] | None = None,
    on_step: Callable[[str, Any], None] = lambda step, about: None,
    allow: Sequence[str] = (),
) -> list[Exported]:
    """Write all segments that are closed, and delete files that nothing refers to.

    A stream that another exporter is exporting is skipped. After an error of one stream, the other
    streams are exported even so. Each further error is a warning in the log.

    Args:
        url: the database, as an owner of the schema or a role with pgqueue_admin.
        options: see `folders.folder`.
        on_step: called at each step, with "leftover", "begun", "slice", "closed", "written" or
            "exported", and what the step is about; of "exported" an `Exported`.
        allow: see `folders.folder`.

    Returns:
        the segments that were written.

    Raises:
        PgQueueError: the first error, after all streams.
    """
    lock, work = Statements(url, patience=0), Statements(url, patience=0)
    done: list[Exported] = []
    errors: list[tuple[str, Exception]] = []
    try:
        for stream_id, stream in work.rows(
            "select stream_id, stream from pgqueue.export_streams()"
        ):
            exporter = _Exporter(url, lock, work, stream_id, options, on_step, allow)
            name = stream or f"{stream_id}, which was dropped"
            try:
                while (each := exporter.export_next(stream)) is not None:
                    done.append(each)
            except Exception as error:
                errors.append((name, error))
            of_archives = dict(exporter.undeleted.values())  # there may be many of one archive
            errors += ((name, error) for error in of_archives.values())
    finally:
        for each in (lock, work):
            each.close()
        let_go(url)
    for name, error in errors[1:]:
        warn("the archive of stream %s: %s", name, error)
    if errors:
        raise errors[0][1]
    return done


class _Exporter:
    """Exports one stream.

    Args:
        lock: the connection that has the export lock in a transaction.
        work: the connection for all other statements.
    """

    def __init__(
        self,
        url: str | None,
        lock: Statements,
        work: Statements,
        stream_id: int,
        options: Mapping[str, Any] | None,
        on_step: Callable[[str, Any], None],
        allow: Sequence[str],
    ):
        self._url, self._lock, self._work = url, lock, work
        self._stream_id, self._on_step = stream_id, on_step
        self._options, self._allow = options, allow
        self.undeleted: dict[Any, tuple[str, Exception]] = {}
        """By attempt, the uri of its archive, and why its files could not be deleted. That must not
        stop the export.
        """

    def export_next(self, stream: str | None) -> Exported | None:
        """Export a segment; None when there is no other, or another exporter is at work."""
        with self._lock.transaction():
            if not self._has_lock():
                return None
            self._lock.rows(NO_TIMEOUTS)
            self._delete_leftovers()
            found = self._work.rows(
                "select attempt, segment, uri, folder, kind from pgqueue.begin_export(%s)",
                [self._stream_id],
            )
            if not found or stream is None:
                return None
            attempt = _Attempt(*found[0])
            self._on_step("begun", attempt)
            try:
                files = self._write(attempt)
                self._on_step("written", files)
                (messages,) = self._lock.row(
                    "select pgqueue.end_export(%s, %s)",
                    [attempt.attempt, Jsonb([each._asdict() for each in files])],
                )
            except BaseException:
                # An exporter that has the lock meanwhile may have cleared the attempt before these
                # files existed: an object store shows a file only when it is complete.
                with suppress(Exception):
                    self._delete(attempt.attempt, attempt.uri, attempt.folder, keep_folder=True)
                raise
        size = sum(each.bytes for each in files)
        exported = Exported(stream, attempt.segment, messages, len(files), size)
        self._on_step("exported", exported)
        return exported

    def _write(self, attempt: _Attempt) -> list[ArchiveFile]:
        """Write the files of a segment, and read them back: the database will drop the segment."""
        try:
            check(attempt.uri, self._options, self._allow)
        except PgQueueError:
            self._work.rows("select pgqueue.forget_leftover(%s)", [attempt.attempt])
            raise
        with folder(attempt.uri, self._options, self._allow) as place:
            below, kind = attempt.folder, attempt.kind
            files = layout.write(place, below, str(attempt.attempt), kind, self._rows(attempt))
            self._on_step("closed", files)
            for each in files:
                self._has_lock()  # as in _rows
                try:
                    verify(place, below, each, kind)
                except (PgQueueError, FileNotFoundError) as error:
                    raise PgQueueError(
                        f"segment {attempt.segment} was written, but cannot be read back: "
                        f"{getattr(error, 'message', error)}",
                        hint="Postgres keeps the segment, and the next run writes it again; check "
                        "the disk or the object store",
                    ) from error
        return files

    def _has_lock(self) -> bool:
        """Whether this exporter has the lock. It takes the lock if it is free."""
        (has_it,) = self._lock.row("select pgqueue.lock_export(%s)", [self._stream_id])
        return has_it

    def _delete_leftovers(self) -> None:
        for attempt, uri, below in self._work.rows(
            "select attempt, uri, folder from pgqueue.export_leftovers(%s)", [self._stream_id]
        ):
            if attempt in self.undeleted:
                continue
            try:
                self._delete(attempt, uri, below)
                self._work.rows("select pgqueue.forget_leftover(%s)", [attempt])
            except Exception as error:
                self.undeleted[attempt] = uri, error
                continue
            self._on_step("leftover", attempt)

    def _delete(self, attempt: Any, uri: str, below: str, keep_folder: bool = False) -> None:
        with folder(uri, self._options, self._allow) as place:
            layout.delete(place, below, str(attempt), keep_folder)

    def _rows(self, attempt: _Attempt) -> Iterator[pa.Table]:
        """The messages of the segment, with the columns of their publications."""
        for lo, hi, first, last in self._work.long_rows(
            "select lo, hi, from_publication, to_publication from pgqueue.export_slices(%s)",
            [attempt.attempt],
        ):
            self._has_lock()  # so the transaction is not idle for long
            with translated(), kept_connection(self._url) as conn, conn.cursor() as cursor:
                call(cursor, NO_TIMEOUTS)
                cursor.execute(
                    f"select * from pgqueue.export_ranges('{attempt.attempt}', {lo}, {hi}, {first},"
                    f" {last})"
                )
                publications = layout.Publications(cursor.fetch_arrow_table(), attempt.kind)
                for messages in self._messages(cursor, attempt.kind, lo, hi):
                    rows = publications.added_to(messages)
                    if rows is None:
                        break
                    yield rows
            if not publications.is_complete:
                raise PgQueueError(
                    f"messages of segment {attempt.segment} are published, but not stored",
                    hint="the database was restored from a dump taken while maintain() ran: call "
                    "recover()",
                )
            self._on_step("slice", (lo, hi))

    def _messages(
        self, cursor: dbapi.Cursor, kind: str, lo: int, hi: int
    ) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        names = layout.schema(kind).names[:5]
        target = pa.schema([layout.schema(kind).field(name) for name in names])
        set_up(cursor)
        cursor.execute(
            f"select {', '.join(expression(name, kind) for name in names)}"
            f" from pgqueue.messages_{self._stream_id} m"
            f" where m.seq >= {lo} and m.seq < {hi} order by m.seq"
        )
        for batch in cursor.fetch_record_batch():
            yield _as_stored(batch, target)


def _as_stored(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """The columns of COPY with the types of the file."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(
        [
            headers_map(batch["headers"], field.type)
            if field.name == "headers"
            else batch[field.name].cast(field.type)
            for field in target
        ],
        schema=target,
    )
