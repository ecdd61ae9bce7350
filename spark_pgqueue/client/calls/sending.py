"""Sending messages, now and by schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from psycopg.rows import dict_row

from spark_pgqueue.client import arguments, copying
from spark_pgqueue.client.calls.base import Calls, statement
from spark_pgqueue.client.results import Schedule

Payload = str | bytes | dict[str, Any] | list[Any]


class Sending(Calls):
    """Sending messages, now and by schedules."""

    def send(
        self,
        stream: str,
        data: Payload,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        priority: int = 0,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_key: str | None = None,
        expires_at: datetime | None = None,
    ) -> int:
        """Publish a message.

            >>> queue.send("orders", "order 3", key="customer 7", headers={"shop": 4})
            3

        Args:
            stream: the stream's name.
            data: the payload: bytes for a binary stream, str for others (JSON text for json). A
                dict or a list is sent as JSON text.
            key: the key for ordering "key"; None for an unordered message.
            headers: JSON-serializable values, by name.
            priority: -32768 to 32767; higher first, for consumers with ordering "none".
            delay: not delivered before this time has passed; None for at once.
            deliver_at: not delivered before this time (with its zone), in place of a delay.
            consumers: the names of the consumers that receive it; None for all.
            dedup_key: publish nothing if a message with this key was sent within the stream's
                dedup window; None for no key.
            expires_at: from this time on (with its zone) the message is dead-lettered, as
                "expired", and not delivered; rounded up to the second. None for never.

        Returns:
            the seq of the message, or of the first message with the same dedup key.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range,
                PQ004 data that does not fit the stream's kind; an argument of the wrong type.
        """
        return self._call(
            "send",
            stream=stream,
            **arguments.payload(data),
            key=key,
            headers=headers,
            priority=priority,
            **arguments.earliest(deliver_at, delay),
            consumers=consumers,
            dedup_key=dedup_key,
            expires_at=expires_at,
        )

    def send_batch(
        self,
        stream: str,
        data: Iterable[Payload],
        *,
        keys: Iterable[str | None] | None = None,
        headers: Iterable[Mapping[str, Any] | None] | None = None,
        priority: int = 0,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_keys: Iterable[str | None] | None = None,
        expires_at: datetime | None = None,
    ) -> list[int]:
        """Publish messages together: they become visible at the same time, in the order given.

            >>> queue.send_batch("orders", ["order 3", "order 4"], keys=["customer 7", None])
            [3, 4]

        Args:
            stream: the stream's name.
            data: a payload for each message, as in `send`.
            keys: a key, or None, for each message; None for no keys.
            headers: headers, or None, for each message; None for no headers.
            priority: as in `send`, for all messages.
            delay: as in `send`, for all messages; so is `deliver_at`.
            deliver_at: ...
            consumers: as in `send`, for all messages.
            dedup_keys: a dedup key, or None, for each message; None for no dedup keys. If two of
                these messages have the same key, only the first is published.
            expires_at: as in `send`, for all messages.

        Returns:
            the seqs, in the same order; for a duplicate, the seq of the first message.

        Raises:
            PgQueueError: as `send`. Nothing is published then.
        """
        payloads = arguments.payloads("data", data)
        binary = bool(payloads) and isinstance(payloads[0], bytes)
        given = {
            "stream": stream,
            "data": None if binary else payloads,
            "data_bytes": payloads if binary else None,
            "keys": keys,
            "headers": headers,
            "dedup_keys": dedup_keys,
            "priority": priority,
            **arguments.earliest(deliver_at, delay),
            "consumers": consumers,
            "expires_at": expires_at,
        }
        sql, values = statement("send_batch", "*", given)
        if sum(map(len, payloads)) >= copying.WORTH_IT:
            seqs = copying.copy_messages(self._statements, payloads, given)
            if seqs is not None:
                return seqs
        rows = self._statements.rows(sql, values)
        return [seq for (seq,) in rows]

    def create_schedule(
        self,
        stream: str,
        name: str,
        data: str | bytes,
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        time_zone: str = "UTC",
        start: datetime | None = None,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        priority: int = 0,
        consumers: Iterable[str] | None = None,
        replace: bool = False,
    ) -> datetime:
        """Send a message at the times of a cron expression or an interval.

        The next claim for a consumer of the stream, or the next `maintain`, sends it. Missed times
        are merged into one message. It has two more headers: `schedule`, the name, and
        `planned_at`, the time (of several missed times the first), in UTC.

            >>> at = queue.create_schedule(
            ...     "orders", "nightly", "close", cron="0 2 * * *", time_zone="Europe/Berlin"
            ... )
            >>> at > datetime.now(UTC)
            True

        Args:
            stream: the stream's name.
            name: 1 to 200 characters.
            data: the payload, as in `send`.
            cron: minute, hour, day of the month, month and day of the week, in the syntax of
                Vixie's cron; or "@hourly", "@daily", ...
            every: an interval instead: whole seconds, or an interval of Postgres, such as "1
                month". Days and months follow the calendar; "24 hours" is a fixed duration.
            time_zone: the name of the time zone of the expression, and of days and months.
            start: the first time (with its zone), from which `every` counts; None for one interval
                from now.
            key: as in `send`.
            headers: as in `send`.
            priority: as in `send`.
            consumers: as in `send`.
            replace: change an existing schedule. If its times do not change, neither does its next
                time.

        Returns:
            the next time.

        Raises:
            PgQueueError: PQ003 times that never come or are not valid; PQ006 a schedule of that
                name exists; and as `send`.
        """
        return self._call(
            "create_schedule",
            stream=stream,
            name=name,
            cron=cron,
            every=every,
            time_zone=time_zone,
            **arguments.payload(data),
            key=key,
            headers=headers,
            priority=priority,
            consumers=consumers,
            start=start,
            replace=replace,
        )

    def drop_schedule(self, stream: str, name: str) -> None:
        """Delete a schedule. Messages that it has sent are kept.

        >>> at = queue.create_schedule("orders", "hourly", "count", every=timedelta(hours=1))
        >>> queue.drop_schedule("orders", "hourly")
        """
        self._call("drop_schedule", stream=stream, name=name)

    def pause_schedule(self, stream: str, name: str) -> None:
        """Suspend a schedule until it is resumed. Safe to repeat.

        >>> at = queue.create_schedule("orders", "hourly", "count", every=timedelta(hours=1))
        >>> queue.pause_schedule("orders", "hourly")
        """
        self._call("pause_schedule", stream=stream, name=name)

    def resume_schedule(self, stream: str, name: str) -> datetime:
        """Resume a paused schedule; returns its next time.

        >>> at = queue.create_schedule("orders", "hourly", "count", every=timedelta(hours=1))
        >>> queue.resume_schedule("orders", "hourly") > datetime.now(UTC)
        True
        """
        return self._call("resume_schedule", stream=stream, name=name)

    def schedules(self, stream: str | None = None) -> list[Schedule]:
        """The schedules of a stream, or of all, by name.

        >>> at = queue.create_schedule("orders", "nightly", "close the day", cron="0 2 * * *")
        >>> [(schedule.name, schedule.cron) for schedule in queue.schedules("orders")]
        [('nightly', '0 2 * * *')]
        """
        self._must_exist(stream)
        rows = self._statements.rows(
            "select stream, schedule as name, cron, every::text as every, time_zone, next_at,"
            " paused, last_planned_at, last_sent_at, last_seq, last_error, key,"
            " data, data_bytes, headers, priority, consumers"
            " from pgqueue.stream_schedules where stream = coalesce(%s::text, stream)"
            " order by stream, schedule",
            [stream],
            row_factory=dict_row,
        )
        return [_schedule(**row) for row in rows]

    def schedule_times(
        self,
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        time_zone: str = "UTC",
        start: datetime | None = None,
        after: datetime | None = None,
        count: int = 5,
    ) -> list[datetime]:
        """The next times of a hypothetical schedule: arguments as in `create_schedule`.

            >>> after = datetime(2026, 1, 31, tzinfo=UTC)
            >>> times = queue.schedule_times(cron="0 2 * * *", after=after, count=2)
            >>> [f"{at.astimezone(UTC):%d %b %H:%M}" for at in times]
            ['31 Jan 02:00', '01 Feb 02:00']

        Args:
            cron: as in `create_schedule`; so are the next three.
            every: an interval instead.
            time_zone: the time zone of these.
            start: the time from which `every` counts.
            after: only times after this one (with its zone); None for now.
            count: how many times, 1 to 1,000.
        """
        rows = self._rows(
            "schedule_times",
            "*",
            cron=cron,
            every=every,
            time_zone=time_zone,
            start=start,
            after=after,
            count=count,
        )
        return [at for (at,) in rows]


def _schedule(data: str | None, data_bytes: bytes | None, **others: Any) -> Schedule:
    return Schedule(data=data if data_bytes is None else data_bytes, **others)
