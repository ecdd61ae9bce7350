"""The claims that a checkpoint of a Spark query holds in Postgres, and what can be done with them.

Each source of the query that reads a consumer is a checkpoint reader. This module needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from psycopg.rows import class_row

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.driver.checkpoint import Checkpoint, position_of


@dataclass(frozen=True)
class ClaimsHeld:
    """The messages that a checkpoint reader holds.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        consumer_id: the consumer's id.
        acked_claim: the last claim that the reader has acknowledged.
        finished: how many held messages are of finished micro-batches.
        unfinished: how many held messages are of the micro-batch that is not finished.
        unlogged: how many held messages are in no checkpoint: the next micro-batch.
        lease_until: the end of the lease, if the query does not run.
        seen_at: the last sign of life of the query.
        backlog: how many messages the consumer has not claimed.
    """

    stream: str
    consumer: str
    consumer_id: int
    acked_claim: int
    finished: int
    unfinished: int
    unlogged: int
    lease_until: datetime | None
    seen_at: datetime
    backlog: int


@dataclass(frozen=True)
class CheckpointReader:
    """A source of a checkpoint that reads a consumer.

    Attributes:
        reader: the reader's id.
        messages: how many messages it has read, in finished micro-batches.
        claim: the last claim that the query has finished; 0 for none.
        last: the last claim in the checkpoint.
        claims_held: the messages that the reader holds; None where the database does not know it.
    """

    reader: str
    messages: int
    claim: int
    last: int
    claims_held: ClaimsHeld | None


class CheckpointReaders:
    """All checkpoint readers of a checkpoint, with their state in the database.

    Args:
        checkpoint: the checkpoint.
        connect: connects to the database; called if a source reads a consumer.
    """

    def __init__(self, checkpoint: Checkpoint, connect: Callable[[], Statements]):
        self._checkpoint = checkpoint
        self._connect = connect
        self._statements: Statements | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._statements is not None:
            self._statements.close()

    def readers(self) -> dict[str, CheckpointReader]:
        """The sources that read a consumer, by their names or numbers."""
        return dict(self._readers())

    def acknowledge(self) -> int:
        """Acknowledge the finished micro-batches; returns the number of messages.

        Raises:
            PgQueueError: the checkpoint is of another database, or is not the latest.
        """
        return sum(
            self._run(
                "select acked from pgqueue.reader_ack(%s, %s, %s)",
                *(each.reader, each.claims_held.consumer_id, each.claim),
            )[0]
            for each in self._known()
            if each.claims_held is not None
        )

    def release(self) -> tuple[int, int]:
        """Acknowledge the finished micro-batches, give back all other messages, and forget the
        readers.

        Returns:
            how many messages were acknowledged, and how many were given back.

        Raises:
            PgQueueError: the query runs (55006); or as `acknowledge`.
        """
        with self._transaction():
            done = [
                self._run(
                    "select acked, released from pgqueue.reader_release(%s, %s, %s)",
                    *(each.reader, each.claims_held.consumer_id, each.claim),
                )
                for each in self._known()
                if each.claims_held is not None
            ]
        return sum(acked for acked, _ in done), sum(released for _, released in done)

    def fork(self, target: Path) -> str:
        """Copy the checkpoint for another query, with readers of its own.

        Returns:
            the other query's id.

        Raises:
            PgQueueError: the last micro-batch is not finished; the target exists; the query went on
                meanwhile; or as `acknowledge`.
        """
        if not self.readers():
            return self._checkpoint.fork(target, {})
        if not self._checkpoint.is_finished:
            raise PgQueueError(
                f"micro-batch {self._checkpoint.last} of {self._checkpoint.folder} is not "
                "finished: its messages are claimed for one query, and both would run it",
                hint="run the query once more, with trigger(availableNow=True), and stop it",
            )
        with self._transaction():
            others = {
                each.reader: str(
                    self._run(
                        "select pgqueue.reader_fork(%s, %s, %s, %s)",
                        *(each.reader, each.claims_held.consumer_id, each.claim, each.messages),
                    )[0]
                )
                for each in self._known()
                if each.claims_held is not None
            }
            return self._checkpoint.fork(target, others)

    def _known(self) -> list[CheckpointReader]:
        readers = list(self.readers().values())
        for each in readers:
            if each.claims_held is None:
                raise PgQueueError(
                    f"the checkpoint {self._checkpoint.folder} is of a reader that this database "
                    "does not know",
                    hint="it is of another database, its consumer was dropped, or it was released "
                    "or forgotten: then it holds nothing",
                    sqlstate="PQ005",
                )
        return readers

    def _readers(self) -> Iterator[tuple[str, CheckpointReader]]:
        for source, offset in self._checkpoint.offsets.items():
            last = position_of(offset)
            if last is None:
                continue
            done = position_of(self._checkpoint.finished_offsets.get(source))
            _, claim, messages = done or (last[0], 0, 0)
            yield (
                source,
                CheckpointReader(
                    last[0], messages, claim, last[1], self._claims_held(last[0], claim, last[1])
                ),
            )

    def _claims_held(self, reader: str, claim: int, last: int) -> ClaimsHeld | None:
        found = self._open().rows(
            "select stream, consumer, consumer_id, acked_claim, finished, unfinished, unlogged, "
            "lease_until, seen_at, pgqueue.consumer_backlog(consumer_id) as backlog "
            "from pgqueue.reader_state(%s, %s, %s)",
            [reader, claim, last],
            row_factory=class_row(ClaimsHeld),
        )
        return found[0] if found else None

    def _open(self) -> Statements:
        if self._statements is None:
            self._statements = self._connect()
        return self._statements

    def _run(self, sql, *parameters) -> tuple:
        return self._open().row(sql, parameters)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._open().transaction():
            yield
