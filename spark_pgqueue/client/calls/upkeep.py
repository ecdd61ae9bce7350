"""Installing and maintaining the schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import timedelta

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls

_MAINTAIN_CALLS = 10_000  # the limit of one maintain(), where there is always more to do


class UpkeepCalls(Calls):
    """Installing and maintaining the schema."""

    def install(self, *, pgmq: bool = False, without: Collection[str] = ()) -> int:
        """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat.

            >>> version = queue.install()

        Args:
            pgmq: also make the schema pgmq, whose functions let clients of pgmq use this queue.
            without: features to leave out: schedules, capture, archive, table_sink (Spark's sink
                into tables), typed (schemas of payloads). One that is there and not in use is
                removed; without the argument, all are there afterwards.

        Returns:
            its version.

        Raises:
            PgQueueError: the database has a newer schema, the role lacks a permission, or a
                feature to leave out is in use, or is none. Nothing is changed then.
        """
        return self._statements.install(pgmq=arguments.flag("pgmq", pgmq), without=without)

    def maintain(
        self,
        staged_age: timedelta = timedelta(days=1),
        reader_age: timedelta = timedelta(days=30),
    ) -> dict[str, int]:
        """Trim messages that need not be kept, and delete the chunks of failed writers.

        The call also forgets abandoned checkpoints. It runs many short transactions. Streams with a
        retention need it about every half minute. Do not call it inside of `transaction`, which
        would hold all its locks.

            >>> deleted = queue.maintain()

        Args:
            staged_age: a time longer than any Spark query takes to write a batch.
            reader_age: a time longer than any Spark query pauses before it is started again.

        Returns:
            how many were deleted, by kind.
        """
        ages = [
            arguments.duration("staged_age", staged_age),
            arguments.duration("reader_age", reader_age),
        ]
        deleted: Counter[str] = Counter()
        for _ in range(_MAINTAIN_CALLS):
            done = dict(
                self._statements.rows(
                    "select what, deleted from pgqueue.maintain(%s::interval, %s::interval)", ages
                )
            )
            unfinished = done.pop("unfinished")
            deleted.update(done)
            if not unfinished:
                break
        return dict(deleted)

    def recover(self) -> dict[str, int]:
        """Begin a new incarnation of each stream, after a restore or the promotion of a standby.

        Call it once, before producers come back. Offsets that are past the restored messages are
        refused from then on; all others go on.

            >>> queue.recover()
            {'orders': 1}

        Returns:
            by stream, the last publication that counts as restored.

        Raises:
            PgQueueError: the server is a standby, or a session is publishing (55P03).
        """
        return dict(self._statements.rows("select stream, last_publication from pgqueue.recover()"))
