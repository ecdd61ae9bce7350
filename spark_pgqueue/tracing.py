"""Traces across the queue: `traceparent` in the headers of messages, by W3C's Trace Context.

    queue.send("orders", data, headers=tracing.headers())

    for message in claim.messages:
        with tracing.span("bill", message):
            bill(message.data)

Where the package opentelemetry is installed, its current context is sent and continued. Elsewhere
the sender gives `traceparent`, and `parent` reads it. No other part of the queue uses traces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
    """The span in which a trace continues.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits: the span in which the message was sent.
        sampled: whether the sender records the trace.
    """

    trace_id: str
    span_id: str
    sampled: bool


def headers(
    others: Mapping[str, Any] | None = None, *, traceparent: str | None = None
) -> dict[str, Any]:
    """Headers for a message, with which its receiver continues the trace.

    Args:
        others: other headers of the message.
        traceparent: the trace; None for OpenTelemetry's current trace, if there is one.

    Raises:
        PgQueueError: traceparent is not of the form 00-<trace id>-<span id>-<flags>.
    """
    found = dict(others or {})
    if traceparent is not None:
        if _parsed(traceparent) is None:
            raise PgQueueError(
                f"traceparent must be 00-<32 hexadecimal digits>-<16>-<2>, not {traceparent!r}"
            )
        return found | {TRACEPARENT: traceparent}
    if propagate := opentelemetry("propagate"):
        propagate.inject(found)
    return found


def parent(message: HasHeaders) -> Parent | None:
    """The parent span of a message; None where it has none, or none that can be read."""
    return _parsed((message.headers or {}).get(TRACEPARENT))


@contextmanager
def span(name: str, message: HasHeaders | Sequence[HasHeaders]) -> Iterator[Any]:
    """Handle a message in a span whose parent is the span in which it was sent.

    A span of several messages continues no trace of theirs. It has a link to each span in which one
    was sent.

    Args:
        name: the name of the span.
        message: the message; or messages, as a handler with the option batch gets them.

    Yields:
        OpenTelemetry's span; None where opentelemetry is not installed.
    """
    trace, propagate = opentelemetry("trace"), opentelemetry("propagate")
    if trace is None or propagate is None:
        yield None
        return
    # Not by their type: some messages are tuples.
    messages: Any = [message] if hasattr(message, "headers") else message
    contexts = [_sent_in(propagate, each) for each in messages]
    if len(contexts) == 1:
        where = {"context": contexts[0]}
    else:
        senders = [trace.get_current_span(each).get_span_context() for each in contexts]
        links = {each.span_id: trace.Link(each) for each in senders if each.is_valid}  # each once
        where = {"links": [*links.values()]}
    with trace.get_tracer("spark_pgqueue").start_as_current_span(
        name, kind=trace.SpanKind.CONSUMER, **where
    ) as made:
        made.set_attribute("messaging.system", "pgqueue")
        if len(contexts) > 1:
            made.set_attribute("messaging.batch.message_count", len(contexts))
        yield made


def _sent_in(propagate: Any, message: HasHeaders) -> Any:
    """OpenTelemetry's context of a message."""
    return propagate.extract(
        {k: v for k, v in (message.headers or {}).items() if isinstance(v, str)}
    )


def _parsed(traceparent: object) -> Parent | None:
    found = _FORM.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    known = version != "ff" and (version != "00" or more is None)
    if not known or set(trace_id) == {"0"} or set(span_id) == {"0"}:
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1))


def opentelemetry(module: str) -> Any:
    """A module of the package opentelemetry; None where that is not installed."""
    try:
        return import_module(f"opentelemetry.{module}")
    except ImportError:
        return None
