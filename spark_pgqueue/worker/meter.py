"""The metrics of a worker, with the names of OpenTelemetry's conventions for messaging.

OpenTelemetry gets them where its package is installed, and exports them where the application has
set up an SDK. `text` has the same as OpenMetrics, for the probes' server.

https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics/
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any

from spark_pgqueue import openmetrics, tracing
from spark_pgqueue.client.messages import Message
from spark_pgqueue.worker.verdicts import Outcome, Reject, Retry

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The upper bounds of the buckets of durations, in seconds, which the conventions advise."""

_DURATION = "The duration of a handler call, by the error with which it ended."
_REDELIVERED = "Redelivered messages for which the handler was called."
_IN_FLIGHT = "Messages that the worker has claimed but not settled."


class Meter:
    """Counts what the handlers of a consumer do, in all runs of a worker. Threads may share it.

    Args:
        stream: the stream's name.
        consumer: the consumer's name.
    """

    def __init__(self, stream: str, consumer: str):
        self._of = {
            "messaging.system": "pgqueue",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": stream,
            "messaging.consumer.group.name": consumer,
        }
        self._lock = Lock()
        self.durations: dict[str, list[float]] = {"": [0.0] * (len(BOUNDS) + 2)}
        """By the error: calls in each bucket, those above, and the sum of seconds."""
        self.redelivered: int = 0
        self._in_flight: dict[object, int] = {}
        self._instruments = _instruments()

    def note_call(self, messages: Sequence[Message], outcome: Outcome, seconds: float) -> None:
        """Record a call of the handler."""
        error = ""
        if isinstance(outcome, Retry | Reject):
            error = "reject" if isinstance(outcome, Reject) else "retry"
        again = sum(message.deliver_count > 1 for message in messages)
        with self._lock:
            found = self.durations.setdefault(error, [0.0] * (len(BOUNDS) + 2))
            found[bisect_left(BOUNDS, seconds)] += 1
            found[-1] += seconds
            self.redelivered += again
        if self._instruments:
            of = self._of | {"error.type": error} if error else self._of
            self._instruments[0].record(seconds, of)
            if again:
                self._instruments[1].add(again, self._of)

    def note_in_flight(self, run: object, count: int) -> None:
        """Record how many messages a run of the worker has claimed and not settled."""
        change = count - self._in_flight.get(run, 0)
        if change:
            self._in_flight[run] = count
            if self._instruments:
                self._instruments[2].add(change, self._of)
        if count == 0:
            self._in_flight.pop(run, None)

    @property
    def in_flight(self) -> int:
        """How many messages are claimed and not settled."""
        return sum(list(self._in_flight.values()))

    def labels(self) -> dict[str, str]:
        """The attributes as labels of OpenMetrics."""
        return {name.replace(".", "_"): value for name, value in self._of.items()}


@cache
def _instruments() -> tuple[Any, Any, Any] | None:
    """Those of the process: workers differ by their attributes."""
    metrics = tracing.opentelemetry("metrics")
    if metrics is None:
        return None
    meter = metrics.get_meter("spark_pgqueue")
    messages = "{message}"
    return (
        meter.create_histogram(
            "messaging.process.duration",
            "s",
            _DURATION,
            explicit_bucket_boundaries_advisory=BOUNDS,
        ),
        meter.create_counter("pgqueue.process.redelivered", messages, _REDELIVERED),
        meter.create_up_down_counter("pgqueue.process.in_flight", messages, _IN_FLIGHT),
    )


def text(meters: Iterable[Meter]) -> str:
    """The metrics of workers as OpenMetrics."""
    found = list(meters)
    durations = (sample for each in found for sample in _buckets(each))
    again = (("_total", each.labels(), each.redelivered) for each in found)
    in_flight = (("", each.labels(), each.in_flight) for each in found)
    duration = "messaging_process_duration_seconds"
    return openmetrics.text(
        [
            openmetrics.Lines(duration, "histogram", _DURATION, durations, "seconds"),
            openmetrics.Lines("pgqueue_process_redelivered", "counter", _REDELIVERED, again),
            openmetrics.Lines("pgqueue_process_in_flight", "gauge", _IN_FLIGHT, in_flight),
        ]
    )


def _buckets(meter: Meter) -> Iterator[openmetrics.Sample]:
    for error, found in list(meter.durations.items()):
        labels = meter.labels() | ({"error_type": error} if error else {})
        *counts, seconds = found
        total = 0
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], counts, strict=True):
            total += int(count)
            yield "_bucket", labels | {"le": bound}, total
        yield "_count", labels, total
        yield "_sum", labels, seconds
