"""Groups: workers that share a stream by partitions of its keys."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.groups import Group
from spark_pgqueue.client.results import GroupStats, PartitionStats
from spark_pgqueue.postgres.errors import PgQueueError


class GroupCalls(Calls):
    """Groups: workers that share a stream by partitions of its keys."""

    def create_group(
        self,
        stream: str,
        name: str,
        *,
        partitions: int = 16,
        start: str | datetime | dict[str, Any] = "latest",
        if_not_exists: bool = False,
    ) -> int:
        """Create a group: workers that share a stream by partitions of its keys.

            >>> group_id = queue.create_group("orders", "mailing", partitions=4, start="earliest")

        Args:
            stream: the stream's name.
            name: 1 to 200 characters, none of a consumer of the stream.
            partitions: the highest number of workers, 1 to 1,024. It never changes.
            start: as in `create_consumer`.
            if_not_exists: accept an existing group with as many partitions.

        Returns:
            the group's id.
        """
        return self._value(
            "select pgqueue.create_group(%s::text, %s::text, %s::int, %s::text, %s::boolean)",
            arguments.text("stream", stream),
            arguments.text("name", name),
            arguments.number("partitions", partitions),
            arguments.position("start", start),
            arguments.flag("if_not_exists", if_not_exists),
        )

    def note_offset(self, stream: str, name: str, offset: dict[str, Any]) -> None:
        """Store the offset of a reader that keeps its offset itself as the position of a group.

        So the reader's lag is visible, and retention waits for it.

            >>> group_id = queue.create_group("orders", "report", partitions=1, start="earliest")
            >>> for batch in queue.read("orders"):
            ...     queue.note_offset("orders", "report", batch.offset)
            >>> [group.behind for group in queue.groups("orders")]
            [0]

        Args:
            stream: the stream's name.
            name: the name of a group of one partition without workers, for this reader alone.
            offset: the reader's offset.

        Raises:
            PgQueueError: PQ003 not an offset, PQ005 an offset of another stream, PQ006 a group with
                workers, PQ007 another isolation than read committed.
        """
        self._value(
            "select pgqueue.note_offset(%s::text, %s::text, %s::jsonb)",
            arguments.text("stream", stream),
            arguments.text("name", name),
            arguments.json_text("offset", offset),
        )

    def group(self, stream: str, name: str) -> Group:
        """A group, whose messages `Group.run` handles.

            >>> group_id = queue.create_group("orders", "mailing", start="earliest")
            >>> mailing = queue.group("orders", "mailing")
            >>> mailing.run(lambda messages, connection: None, wait=timedelta(0))
            2

        Raises:
            PgQueueError: the client uses the caller's connection.
        """
        self._check_can_wait()
        return Group(
            self._statements,
            self._long_poll,
            arguments.text("stream", stream),
            arguments.text("name", name),
            self._statements.another,
        )

    def groups(self, stream: str | None = None) -> list[GroupStats]:
        """The groups of a stream, or of all streams, and how far behind they are.

        >>> group_id = queue.create_group("orders", "mailing", partitions=4, start="earliest")
        >>> [(group.name, group.partitions, group.behind) for group in queue.groups("orders")]
        [('mailing', 4, 2)]
        """
        self._must_exist(stream)
        return self._statements.rows(
            'select stream, "group" as name, count(*)::int as partitions,'
            " count(distinct worker)::int as workers, max(behind) as behind,"
            " bool_or(estimated) as estimated"
            " from pgqueue.group_stats where stream = coalesce(%s::text, stream)"
            ' group by stream, "group" order by stream, "group"',
            [stream],
            row_factory=class_row(GroupStats),
        )

    def partitions(self, stream: str, name: str) -> list[PartitionStats]:
        """The partitions of a group, with their workers, and how far behind they are.

        >>> group_id = queue.create_group("orders", "mailing", partitions=2)
        >>> [(each.partition, each.worker) for each in queue.partitions("orders", "mailing")]
        [(0, None), (1, None)]
        """
        found = self._statements.rows(
            "select partition, worker, lease_until, committed_at, behind, estimated"
            " from pgqueue.group_stats"
            ' where stream = %s::text and "group" = %s::text order by partition',
            [arguments.text("stream", stream), arguments.text("name", name)],
            row_factory=class_row(PartitionStats),
        )
        if not found:
            self._must_exist(stream)
            raise PgQueueError(
                f"stream {stream!r} has no group {name!r}",
                hint="create it, or see which there are: pgqueue group list",
                sqlstate="PQ002",
            )
        return found
