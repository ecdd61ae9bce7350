"""The checkpoint of a Spark query: its files, and the claims that it holds in Postgres.

A checkpoint is a folder. Spark writes `offsets/N` before micro-batch N begins, with the end of the
batch for each source of the query. It writes `commits/N` when the batch is done. If the last
`offsets/N` has no commit, the batch is not finished, and Spark runs it again when the query
restarts. Each source that reads a consumer is a checkpoint reader. This module needs no Spark.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from psycopg.rows import class_row

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.options.values import local_folder

VERSIONS = ("v1", "v2")
"""Formats of `offsets/N`: a line for each source, by its number (v1) or with its name (v2)."""

FIELDS = ["reader", "claim", "messages"]
"""The fields of an offset of a checkpoint reader, in the order in which they are written."""


def position_of(offset: Any) -> tuple[str, int, int] | None:
    """reader, claim and messages of a checkpoint reader's offset; None for another offset."""
    if isinstance(offset, dict) and list(offset) == FIELDS:
        return offset["reader"], offset["claim"], offset["messages"]
    return None


def unknown_offset(offset: Any) -> PgQueueError:
    """The error for an offset of another version, or of another format such as rate."""
    return PgQueueError(
        f"the checkpoint's offset {offset} was not written by this version of spark-pgqueue",
        hint="upgrade spark-pgqueue if a newer version wrote it; otherwise give the query a "
        "checkpointLocation of its own",
        sqlstate=FOREIGN_CHECKPOINT,
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, as it was when it was read."""

    folder: Path  # the checkpoint's folder
    # the query's id, which stays the same after restarts; None where the checkpoint has none yet
    query_id: str | None
    last: int | None  # the number of the last micro-batch that was begun; None for none
    finished: int | None  # the number of the last micro-batch that was finished; None for none
    # the end of batch `last`, by source; None for a source without messages
    offsets: dict[str, Any]
    finished_offsets: dict[str, Any]  # the end of batch `finished`, by source

    @classmethod
    def read(cls, location: str) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            PgQueueError: the location is not on this machine, is no checkpoint, or was written by
                an unknown version of Spark.
        """
        try:
            folder = local_folder(location)
        except ValueError:
            raise PgQueueError(
                f"the checkpoint {location} is not in a local folder",
                hint="copy all of it to a local folder (for example with `aws s3 cp --recursive` "
                "or `hdfs dfs -get`), and pass that folder",
            ) from None
        if not (folder / "offsets").is_dir():
            raise PgQueueError(
                f"{folder} is not a checkpoint: it has no folder offsets",
                hint="give the checkpointLocation of the query",
            )
        # The commits are read first, because a running query may add offsets and commits.
        finished, last = _last(folder / "commits"), _last(folder / "offsets")
        if finished is not None and not (folder / "offsets" / str(finished)).exists():
            raise PgQueueError(
                f"the checkpoint {folder} is not complete: it has commits/{finished} but not "
                f"offsets/{finished}",
                hint="copy it again, all of it, while its query does not run",
            )
        return cls(
            *(folder, _query_id(folder), last, finished),
            offsets_in(folder, last),
            offsets_in(folder, finished),
        )

    @property
    def is_finished(self) -> bool:
        """Whether the last micro-batch that was begun is finished."""
        return self.last == self.finished

    def fork(self, target: Path, readers: dict[str, str]) -> str:
        """Copy the checkpoint for another query, which goes on from the same place; returns its id.

        `readers` has the ids of the checkpoint readers, and the ids of their copies.

        Raises:
            PgQueueError: the target exists; or the query ran during the copy, which was deleted.
        """
        if target.exists():
            raise PgQueueError(f"{target} already exists", hint="use a folder that does not exist")
        query_id = str(uuid4())
        shutil.copytree(self.folder, target)
        try:
            _write(target / "metadata", json.dumps({"id": query_id}))
            for file in _numbered(target / "offsets"):
                text = file.read_text()
                for reader, other in readers.items():
                    text = text.replace(reader, other)
                _write(file, text)
            again = Checkpoint.read(str(self.folder))
            if (again.last, again.finished) != (self.last, self.finished):
                raise PgQueueError(
                    f"the query of {self.folder} is running: it made progress while its checkpoint "
                    "was copied",
                    hint="stop the query first",
                )
        except BaseException:
            shutil.rmtree(target)
            raise
        return query_id


def offsets_in(folder: Path, batch: int | None) -> dict[str, Any]:
    """The end of a micro-batch, by source: its name, or its number.

    Raises:
        PgQueueError: an unknown version of Spark has written the checkpoint.
    """
    if batch is None:
        return {}
    file = folder / "offsets" / str(batch)
    version, _, *lines = file.read_text().splitlines() or [""] * 2
    if version not in VERSIONS:
        raise PgQueueError(
            f"{file} is of format {version!r}, which is unknown",
            hint="upgrade spark-pgqueue: a newer Spark has written it",
        )
    if version == "v2":
        named = (line.partition(":")[::2] for line in lines)
    else:
        named = ((str(number), line) for number, line in enumerate(lines))
    return {name: _offset(text) for name, text in named}


def _offset(text: str) -> Any:
    if text == "-":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text  # the offset of another format


def _last(folder: Path) -> int | None:
    return max((int(file.name) for file in _numbered(folder)), default=None)


def _numbered(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (file for file in folder.iterdir() if file.name.isdecimal())


def _query_id(folder: Path) -> str | None:
    try:
        return json.loads((folder / "metadata").read_text())["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise PgQueueError(
            f"{folder}/metadata was not written by Spark",
            hint="give the checkpointLocation of the query",
        ) from None


def _write(file: Path, text: str) -> None:
    """Write a file of Spark, and remove the checksum of its former content."""
    file.write_text(text)
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


@dataclass(frozen=True)
class ClaimsHeld:
    """The messages that a checkpoint reader holds."""

    stream: str  # the stream's name
    consumer: str  # the consumer's name
    consumer_id: int  # the consumer's id
    acked_claim: int  # the last claim that the reader has acknowledged
    finished: int  # the number of held messages of finished micro-batches
    unfinished: int  # the number of held messages of the unfinished micro-batch
    unlogged: int  # the number of held messages that no checkpoint has: the next micro-batch
    lease_until: datetime | None  # the end of the lease, if the query does not run
    seen_at: datetime  # when the query last extended its lease
    backlog: int  # how many messages the consumer has not claimed


@dataclass(frozen=True)
class CheckpointReader:
    """A source of a checkpoint that reads a consumer."""

    reader: str  # the reader's id
    messages: int  # how many messages it has read, in finished micro-batches
    claim: int  # the last claim that the query has finished; 0 for none
    last: int  # the last claim in the checkpoint
    # the messages that the reader holds; None if the database has no such reader
    claims_held: ClaimsHeld | None


class CheckpointReaders:
    """All checkpoint readers of a checkpoint, with their state in the database."""

    def __init__(self, checkpoint: Checkpoint, statements: Statements):
        self._checkpoint = checkpoint
        self._statements = statements

    def readers(self) -> dict[str, CheckpointReader]:
        """The sources that read a consumer, by their names or numbers."""
        found = {}
        for source, offset in self._checkpoint.offsets.items():
            last = position_of(offset)
            if last is not None:
                done = position_of(self._checkpoint.finished_offsets.get(source))
                _, claim, messages = done or (last[0], 0, 0)
                held = self._claims_held(last[0], claim, last[1])
                found[source] = CheckpointReader(last[0], messages, claim, last[1], held)
        return found

    def acknowledge(self) -> int:
        """Acknowledge the finished micro-batches; returns the number of messages.

        Raises:
            PgQueueError: the checkpoint belongs to another database, or is not the latest.
        """
        sql = "select acked from pgqueue.reader_ack(%s, %s, %s)"
        return sum(
            self._statements.row(sql, [each.reader, held.consumer_id, each.claim])[0]
            for each, held in self._known()
        )

    def release(self) -> tuple[int, int]:
        """Acknowledge the finished micro-batches, return all other messages, and delete the
        readers.

        Returns the numbers of messages that were acknowledged, and returned.

        Raises:
            PgQueueError: the query runs (55006); or as `acknowledge`.
        """
        sql = "select acked, released from pgqueue.reader_release(%s, %s, %s)"
        with self._statements.transaction():
            done = [
                self._statements.row(sql, [each.reader, held.consumer_id, each.claim])
                for each, held in self._known()
            ]
        return sum(acked for acked, _ in done), sum(released for _, released in done)

    def fork(self, target: Path) -> str:
        """Copy the checkpoint for another query, with readers of its own; returns its id.

        Raises:
            PgQueueError: the last micro-batch is not finished; the target exists; the query ran
                during the copy; or as `acknowledge`.
        """
        if not self.readers():
            return self._checkpoint.fork(target, {})
        if not self._checkpoint.is_finished:
            raise PgQueueError(
                f"micro-batch {self._checkpoint.last} of {self._checkpoint.folder} is not "
                "finished: its messages are claimed for one query, and both would run it",
                hint="run the query once more, with trigger(availableNow=True), and stop it",
            )
        sql = "select pgqueue.reader_fork(%s, %s, %s, %s)::text"
        with self._statements.transaction():
            others: dict[str, str] = {}
            for each, held in self._known():
                values = [each.reader, held.consumer_id, each.claim, each.messages]
                (others[each.reader],) = self._statements.row(sql, values)
            return self._checkpoint.fork(target, others)

    def _known(self) -> list[tuple[CheckpointReader, ClaimsHeld]]:
        """The readers, with the messages that they hold; a reader must be in the database."""
        known = []
        for each in self.readers().values():
            if each.claims_held is None:
                raise PgQueueError(
                    f"the checkpoint {self._checkpoint.folder} has a reader that does not exist in "
                    "this database",
                    hint="it belongs to another database, its consumer was dropped, or the reader "
                    "was released or deleted: then it holds nothing",
                    sqlstate="PQ005",
                )
            known.append((each, each.claims_held))
        return known

    def _claims_held(self, reader: str, claim: int, last: int) -> ClaimsHeld | None:
        found = self._statements.rows(
            "select stream, consumer, consumer_id, acked_claim, finished, unfinished, unlogged, "
            "lease_until, seen_at, pgqueue.consumer_backlog(consumer_id) as backlog "
            "from pgqueue.reader_state(%s, %s, %s)",
            [reader, claim, last],
            row_factory=class_row(ClaimsHeld),
        )
        return found[0] if found else None
