"""The options of a reader without a consumer: what is accepted, and the errors for all else."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.source import parse_source
from spark_pgqueue.spark.options.stream_source import parse_stream_source

NO_PLACE = '{"s": {"0": 17}}'
OFFSET = {"incarnation": "6fd9", "next": 3, "messages": 4}


def test_defaults_and_conversions():
    options = parse_stream_source({"stream": "s"})
    assert (options.fail_on_data_loss, options.include_headers) == (True, True)
    assert (options.start_of("s", "latest"), options.end_of("s")) == ("latest", "latest")
    assert options.retry_timeout == timedelta(minutes=5)
    assert not options.has_several
    given = {"STREAMS": "b, a", "maxtriggerdelay": "2 minutes", "minMessagesPerTrigger": "5"}
    options = parse_stream_source(
        given | {"maxBytesPerTrigger": "2MB", "startingoffsets": "Earliest"}
    )
    assert options.names == ("b", "a")
    assert options.has_several
    assert options.admission.min_messages == 5
    assert options.admission.max_bytes == 2 << 20
    assert options.admission.max_delay == timedelta(minutes=2)
    assert options.start_of("a", "latest") == "earliest"
    for text in ("b, a", str(["b", "a"]), json.dumps(["b", "a"])):
        assert parse_stream_source({"streams": text}).names == ("b", "a")
    assert parse_stream_source({"streamPattern": "orders_.*"}).names is None


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("latest", "latest"),
        (" Earliest ", "earliest"),
        ({"s": "earliest"}, "earliest"),
        ({"s": "seq 17"}, "seq 17"),
        ({"s": "2026-01-31T12:00:00Z"}, "2026-01-31T12:00:00+00:00"),
        ({"s": "20260131T13+01"}, "2026-01-31T13:00:00+01:00"),
        ({"s": "1769860800000"}, "2026-01-31T12:00:00+00:00"),
        ({"s": OFFSET}, OFFSET),
        (OFFSET | {"stream": "s"}, OFFSET),
        ({"streams": {"s": OFFSET | {"from": OFFSET}}}, OFFSET),
        (json.dumps(json.dumps({"streams": {"s": OFFSET}})), OFFSET),
    ],
)
def test_places(given, place):
    text = given if isinstance(given, str) else json.dumps(given)
    assert parse_stream_source({"stream": "s", "startingOffsets": text}).start_of("s", "-") == place


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("stream", " ", "a stream's name"),
        ("streams", "a,,b", "names of streams"),
        ("streams", "a,b,a", "names of streams"),
        ("streams", "['a', 1]", "names of streams"),
        ("streams", "[]", "names of streams"),
        ("streams", "['a'", "names of streams"),
        ("streamPattern", "orders_(", "a regular expression"),
        *(
            ("startingOffsets", each, 'must be earliest, latest, "seq 17" of one stream, or JSON')
            for each in ("yesterday", '"{}"', "17", "{}", '{"s": 17}', '{"s": "soon"}', NO_PLACE)
        ),
        ("endingOffsets", "now", 'must be latest, "seq 17"'),
        ("startingTimestamp", "2026-01-31T12:00:00", "a timestamp with time zone"),
        ("startingTimestamp", "9" * 16, "a timestamp with time zone"),
        ("startingTimestamp", "9" * 15, "a timestamp with time zone"),
        ("startingOffsets", json.dumps({"s": "9" * 15}), "earliest, latest"),
        ("startingOffsets", "[" * 100_000, "earliest, latest"),
        ("streamPattern", "(" * 3000, "a regular expression"),
        ("endingTimestamp", "", "milliseconds since 1970"),
        ("waitTime", "30", "a duration"),
        ("failOnDataLoss", "no", "true or false"),
    ],
)
def test_a_malformed_value_names_option_value_and_what_is_allowed(name, value, allowed):
    streams = {} if name.startswith("stream") else {"stream": "s"}
    with pytest.raises(PgQueueError) as error:
        parse_stream_source(streams | {name.lower(): value})
    assert f"option {name} is {value!r}, but must be " in error.value.message
    assert allowed in error.value.message


@pytest.mark.parametrize(
    ("given", "streaming", "says", "hint"),
    [
        ({}, True, "option stream is missing", "streams or streamPattern"),
        ({"stream": "s", "streams": "t"}, True, "options stream and streams are", "one of them"),
        ({"streams": "s", "streamPattern": "t"}, True, "streams and streamPattern", "one of them"),
        (
            {"stream": "s", "startingOffsets": "latest", "startingTimestamp": "0"},
            *(True, "startingOffsets and startingTimestamp are given", "one of them"),
        ),
        (
            {"stream": "s", "endingOffsets": "latest", "endingTimestamp": "0"},
            *(False, "endingOffsets and endingTimestamp are given", "one of them"),
        ),
        (
            {"streams": "s,t", "startingOffsets": '{"s": "latest"}'},
            *(True, "startingOffsets lacks 't', one of the streams", "each of them"),
        ),
        (
            {"stream": "s", "endingOffsets": '{"s": "latest", "t": "latest"}'},
            *(False, "endingOffsets names 't', which is none of the streams", "each of them"),
        ),
        (
            {"stream": "s", "endingOffsets": "earliest"},
            *(False, "endingOffsets is 'earliest'", "latest, or JSON"),
        ),
        (
            {"stream": "s", "endingOffsets": '{"s": "earliest"}'},
            *(False, "endingOffsets is 'earliest'", "with other positions"),
        ),
        (
            {
                "stream": "s",
                "startingOffsets": '{"s": "seq 9"}',
                "endingOffsets": '{"s": "seq 8"}',
            },
            *(False, "start at seq 9, but end before that, at seq 8", "endingOffsets"),
        ),
        (
            {
                "streamPattern": "s.*",
                "startingTimestamp": "2026-01-31T12:00:00Z",
                "endingTimestamp": "2026-01-31T12:00:00+01:00",
            },
            *(False, "end before that, at 2026-01-31T12:00:00+01:00", "startingTimestamp"),
        ),
        ({"stream": "s", "consumerr": "c"}, True, "no option consumerr", "did you mean consumer?"),
        ({"stream": "s", "tabel": "dead"}, False, "no option tabel", "did you mean table?"),
        (
            {"stream": "s", "endingTimestamp": "0"},
            *(True, "endingTimestamp is for spark.read", "availableNow"),
        ),
        (
            {"stream": "s", "waitTime": "1s"},
            *(False, "waitTime is for spark.readStream", "reads its range once"),
        ),
        (
            {"stream": "s", "visibilitytimeout": "3s"},
            *(True, "option visibilityTimeout needs consumer", 'add option("consumer"'),
        ),
        (
            {"stream": "s", "createConsumer": "true"},
            *(None, "option createConsumer needs consumer", 'add option("consumer"'),
        ),
        ({"stream": "s", "subscribe": "t"}, True, "no option subscribe", "use stream"),
        ({"stream": "s", "group": "g"}, False, "group is for spark.readStream", "remove it"),
        (
            {"stream": "s", "startingOffsetsByTimestamp": "{}"},
            *(True, "no option startingOffsetsByTimestamp", "with a time for each stream"),
        ),
    ],
)
def test_options_that_do_not_fit_say_so_and_what_to_do(given, streaming, says, hint):
    with pytest.raises(PgQueueError) as error:
        parse_stream_source(given, streaming=streaming)
    assert says in error.value.message
    assert hint in (error.value.hint or "")


def test_a_batch_may_end_where_it_begins():
    for place in ("seq 9", "2026-01-31T12:00:00+00:00"):
        places = json.dumps({"s": place})
        given = {"stream": "s", "startingOffsets": places, "endingOffsets": places}
        assert parse_stream_source(given).end_of("s") == place
    given = {"stream": "s", "startingOffsets": '{"s": "seq 9"}', "endingTimestamp": "0"}
    assert parse_stream_source(given).end_of("s") == "1970-01-01T00:00:00+00:00"


@pytest.mark.parametrize("name", ["streams", "streamPattern", "startingOffsets", "endingTimestamp"])
def test_with_a_consumer_they_are_refused_with_the_way_out(name):
    with pytest.raises(PgQueueError, match=f"no option {name}") as error:
        parse_source({"stream": "s", "consumer": "c", name: "x"})
    assert "did you mean" not in (error.value.hint or "")
