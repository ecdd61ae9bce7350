"""A stream or a consumer with all that belongs to it, as the client describes them."""

from __future__ import annotations

from dataclasses import dataclass

from spark_pgqueue.client.results import (
    Binding,
    Capture,
    ConsumerHealth,
    ConsumerInfo,
    ConsumerStats,
    GroupStats,
    Position,
    Retention,
    Schedule,
    Stream,
)


@dataclass(frozen=True)
class StreamDescription:
    """A stream, and everything that belongs to it.

    Attributes:
        stream: its kind, settings and sizes.
        retention: how long its messages are kept.
        consumers: the figures of its consumers.
        groups: the groups of workers that share it.
        bindings: the bindings that copy messages from it, or to it.
        captures: the tables whose changes become its messages.
        schedules: the schedules that send to it.
    """

    stream: Stream
    retention: Retention
    consumers: list[ConsumerStats]
    groups: list[GroupStats]
    bindings: list[Binding]
    captures: list[Capture]
    schedules: list[Schedule]


@dataclass(frozen=True)
class ConsumerDescription:
    """A consumer, its position and its figures.

    Attributes:
        consumer: its settings.
        position: its position in the stream.
        stats: its figures.
        health: whether it needs attention.
    """

    consumer: ConsumerInfo
    position: Position
    stats: ConsumerStats
    health: ConsumerHealth
