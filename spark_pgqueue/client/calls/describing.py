"""Full descriptions of streams and consumers."""

from __future__ import annotations

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.groups import GroupCalls
from spark_pgqueue.client.calls.schedules import ScheduleCalls
from spark_pgqueue.client.calls.seeing import SeeCalls
from spark_pgqueue.client.descriptions import ConsumerDescription, StreamDescription
from spark_pgqueue.client.results import Position


class DescribeCalls(SeeCalls, ScheduleCalls, GroupCalls):
    """Full descriptions of streams and consumers."""

    def position(self, stream: str, consumer: str) -> Position:
        """The position of a consumer in its stream.

            >>> queue.position("orders", "billing").next_seq
            1

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer.
        """
        (found,) = self._statements.rows(
            "select next_seq, published_at, in_gaps"
            " from pgqueue.consumer_position(%s::text, %s::text)",
            [arguments.text("stream", stream), arguments.text("consumer", consumer)],
            row_factory=class_row(Position),
        )
        return found

    def describe_stream(self, stream: str) -> StreamDescription:
        """A stream with its settings, its sizes, and everything that belongs to it.

            >>> described = queue.describe_stream("orders")
            >>> described.stream.kind, [consumer.consumer for consumer in described.consumers]
            ('text', ['billing'])

        Raises:
            PgQueueError: PQ001 unknown stream.
        """
        self._must_exist(stream)
        (info,) = [each for each in self.streams() if each.name == stream]
        (retention,) = self.retention(stream)
        return StreamDescription(
            stream=info,
            retention=retention,
            consumers=self.stats(stream),
            groups=self.groups(stream),
            bindings=[each for each in self.bindings() if stream in (each.stream, each.to_stream)],
            captures=[each for each in self.captures() if each.stream == stream],
            schedules=self.schedules(stream),
        )

    def describe_consumer(self, stream: str, consumer: str) -> ConsumerDescription:
        """A consumer with its settings, its position and its figures.

            >>> described = queue.describe_consumer("orders", "billing")
            >>> described.consumer.ordering, described.stats.backlog
            ('none', 2)

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer.
        """
        position = self.position(stream, consumer)
        (info,) = [each for each in self.consumers(stream) if each.name == consumer]
        (stats,) = [each for each in self.stats(stream) if each.consumer == consumer]
        (health,) = [each for each in self.health(stream) if each.consumer == consumer]
        return ConsumerDescription(info, position, stats, health)
