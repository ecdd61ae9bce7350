"""A trace goes on behind the queue, with OpenTelemetry and without."""

import sys
from datetime import timedelta
from functools import partial

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spark_pgqueue
from spark_pgqueue import tracing

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def spans():
    """What was traced."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def received(queue):
    claim = queue.receive("s", "c")
    claim.ack()
    return claim.messages[0]


@pytest.mark.promise("feature: hooks, telemetry")
def test_the_span_of_the_worker_is_a_child_of_the_senders(queue, spans):
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("order"):
        queue.send("s", "x", headers=tracing.headers({"a": 1}))
    message = received(queue)
    assert message.headers["a"] == 1
    with tracing.span("bill", message), tracer.start_as_current_span("inner"):
        pass
    inner, bill, order = (next(s for s in spans.get_finished_spans() if s.name == name)
                          for name in ("inner", "bill", "order"))  # fmt: skip
    assert bill.parent.span_id == order.context.span_id
    assert bill.context.trace_id == inner.context.trace_id == order.context.trace_id
    assert bill.kind is trace.SpanKind.CONSUMER
    sent_in = tracing.parent(message)
    assert sent_in is not None
    assert sent_in.span_id == f"{order.context.span_id:016x}"


def test_a_span_of_a_batch_is_linked_to_each_sender(queue, url, spans):
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("two orders"):
        queue.send_batch("s", ["a", "b"], headers=[tracing.headers()] * 2)
    with tracer.start_as_current_span("an order"):
        queue.send("s", "c", headers=tracing.headers())
    queue.send("s", "d")
    wrap, handled = partial(tracing.span, "bill all"), []
    worker = spark_pgqueue.Consumer(url, "s", "c")
    assert worker.run(handled.append, batch=10, wait=timedelta(), wrap=wrap) == 4
    with tracing.span("bill one", handled[0][2:3]):
        pass
    two, one, bill_all, bill_one = (
        next(s for s in spans.get_finished_spans() if s.name == name)
        for name in ("two orders", "an order", "bill all", "bill one")
    )
    assert bill_all.parent is None
    assert [each.context.span_id for each in bill_all.links] == [
        two.context.span_id,
        one.context.span_id,
    ]
    assert bill_all.attributes["messaging.batch.message_count"] == 4
    assert bill_one.parent.span_id == one.context.span_id


def test_without_opentelemetry_it_is_given_by_hand(queue, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert tracing.headers() == {}
    queue.send("s", "x", headers=tracing.headers(traceparent=GIVEN))
    message = received(queue)
    assert tracing.parent(message) == (
        "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True,
    )  # fmt: skip
    with tracing.span("bill", message) as span:
        assert span is None


UNFIT = ["", "00-00-00-01", GIVEN.upper(), f"{GIVEN}-more", f"ff{GIVEN[2:]}"]


@pytest.mark.parametrize("given", [*UNFIT, f"00-{'0' * 32}-{'1' * 16}-00"])
def test_what_is_no_traceparent_is_refused_and_passed_over(queue, given):
    with pytest.raises(spark_pgqueue.PgQueueError, match="traceparent must be 00-"):
        tracing.headers(traceparent=given)
    queue.send("s", "x", headers={"traceparent": given})
    message = received(queue)
    assert tracing.parent(message) is None
    with tracing.span("bill", message):
        pass


def test_other_headers_do_not_matter(queue, spans):
    for headers in (None, {}, {"traceparent": 7, "x": [1]}):
        queue.send("s", "x", headers=headers)
        message = received(queue)
        assert tracing.parent(message) is None
        with tracing.span("bill", message):
            pass
