"""Traces across the queue: `traceparent` in the headers of messages, as W3C's Trace Context has it.

    queue.send("orders", data, headers=tracing.headers())

    for message in claim.messages:
        with tracing.span("bill", message):
            bill(message.data)

Where the package opentelemetry can be imported, its current context is sent and continued; else
`traceparent` is given by hand, and `parent` reads it. Nothing else of the queue knows of traces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from spark_pgqueue.postgres.errors import PgQueueError

TRACEPARENT = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class HasHeaders(Protocol):
    """A message: of a claim, or read without one."""

    @property
    def headers(self) -> Mapping[str, Any] | None: ...


class Parent(NamedTuple):
    """Where a trace goes on.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits: of the span in which the message was sent.
        sampled: whether the sender records the trace.
    """

    trace_id: str
    span_id: str
    sampled: bool


def headers(
    others: Mapping[str, Any] | None = None, *, traceparent: str | None = None
) -> dict[str, Any]:
    """Headers to send a message with, so that its receiver goes on with the trace.

    Args:
        others: what else the headers have.
        traceparent: the trace, given by hand; None: OpenTelemetry's current one, if there is one.

    Raises:
        PgQueueError: traceparent is not of the form 00-<trace id>-<span id>-<flags>.
    """
    found = dict(others or {})
    if traceparent is not None:
        if _parsed(traceparent) is None:
            raise PgQueueError(
                f"traceparent is 00-<32 hexadecimal digits>-<16>-<2>, not {traceparent!r}"
            )
        return found | {TRACEPARENT: traceparent}
    if propagate := _opentelemetry("propagate"):
        propagate.inject(found)
    return found


def parent(message: HasHeaders) -> Parent | None:
    """Where the trace of a message goes on; None: it has none, or none that can be read."""
    return _parsed((message.headers or {}).get(TRACEPARENT))


@contextmanager
def span(name: str, message: HasHeaders) -> Iterator[Any]:
    """Work on a message in a span of its own, whose parent is the one in which it was sent.

    Args:
        name: of the span.
        message: what is worked on.

    Yields:
        OpenTelemetry's span; None where opentelemetry cannot be imported.
    """
    trace, propagate = _opentelemetry("trace"), _opentelemetry("propagate")
    if trace is None or propagate is None:
        yield None
        return
    carrier = {k: v for k, v in (message.headers or {}).items() if isinstance(v, str)}
    with trace.get_tracer("spark_pgqueue").start_as_current_span(
        name, context=propagate.extract(carrier), kind=trace.SpanKind.CONSUMER
    ) as made:
        made.set_attribute("messaging.system", "pgqueue")
        yield made


def _parsed(traceparent: object) -> Parent | None:
    found = _FORM.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    known = version != "ff" and (version != "00" or more is None)
    if not known or set(trace_id) == {"0"} or set(span_id) == {"0"}:
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1))


def _opentelemetry(module: str) -> Any:
    try:
        return import_module(f"opentelemetry.{module}")
    except ImportError:
        return None
