"""The options of source and sink: what is accepted, and the one clear error for everything else."""

from datetime import timedelta

import pytest

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import conninfo, describe, parse
from spark_pgqueue.spark.options.sink import SINK_OPTIONS, parse_sink
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS, parse_source
from spark_pgqueue.spark.options.stream_source import STREAM_SOURCE_OPTIONS, parse_stream_source
from spark_pgqueue.spark.options.values import duration

SOURCE = {"stream": "s", "consumer": "c"}


def test_names_are_case_insensitive_and_values_are_converted():
    options = parse_source(
        SOURCE
        | {
            "maxmessagespertrigger": "1000",
            "MINPARTITIONS": "4",
            "maxbytespertrigger": "100 MB",
            "visibilitytimeout": "2 minutes",
            "failOnDataLoss": "False",
            "createconsumer": "true",
            "startingposition": "Earliest",
            "ordering": "key",
        }
    )
    assert options.max_messages_per_trigger == 1000
    assert options.min_partitions == 4
    assert options.max_bytes_per_trigger == 100 << 20
    assert options.visibility_timeout == timedelta(minutes=2)
    assert options.fail_on_data_loss is False
    assert (options.create_consumer, options.starting_position, options.ordering) == (
        True,
        "earliest",
        "key",
    )


def test_defaults():
    options = parse_source(SOURCE)
    assert options.wait_time == timedelta(seconds=1)
    assert options.fail_on_data_loss is True
    assert options.include_headers is True
    assert options.create_consumer is False
    assert options.max_messages_per_trigger is None
    assert options.retry_timeout == timedelta(minutes=5)
    assert parse_sink({"stream": "s"}, streaming=True).consumers is None
    assert parse_sink({"stream": "s"}, streaming=True).retry_timeout == timedelta(minutes=5)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("500ms", 0.5),
        ("5 minutes", 300),
        ("1 hour 30 minutes", 5400),
        ("interval 1 day", 86400),
        ("1.5 seconds", 1.5),
        (" 2 MIN ", 120),
    ],
)
def test_durations(text, seconds):
    assert duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "30", "-5s", "0s", "five minutes", "5 lightyears", "5s x"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError):
        duration(text)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("maxMessagesPerTrigger", "many", "a whole number of at least 1"),
        ("maxMessagesPerTrigger", "0", "a whole number of at least 1"),
        ("maxMessagesPerTrigger", "1.5", "a whole number of at least 1"),
        ("maxBytesPerTrigger", "0", "a number of bytes of at least 1"),
        ("maxBytesPerTrigger", "10 elephants", "a number of bytes of at least 1"),
        ("maxBytesPerTrigger", "9999999t", "a number of bytes of at least 1"),
        ("minMessagesPerTrigger", "0", "a whole number of at least 1"),
        ("maxTriggerDelay", "15", "a duration longer than 0 with a unit"),
        ("minPartitions", "-1", "a whole number of at least 1"),
        ("maxRecordsPerPartition", "0", "a whole number of at least 1"),
        ("quarantineAfter", "0", "a whole number of at least 1"),
        ("quarantineAfter", "never", "a whole number of at least 1"),
        ("maxRecordsPerPartition", str(2**63), "a whole number of at least 1"),
        ("visibilityTimeout", "30", "a duration longer than 0 with a unit"),
        ("waitTime", "soon", "a duration longer than 0 with a unit"),
        ("failOnDataLoss", "yes", "true or false"),
        ("includeHeaders", "1", "true or false"),
        ("createConsumer", "", "true or false"),
        ("startingPosition", "yesterday", "earliest, latest, a timestamp with time zone"),
        ("startingPosition", "{}", "or an offset of the stream"),
        ("startingPosition", '{"s": {"incarnation": "x"}}', "or an offset of the stream"),
        ("startingPosition", "2026-01-31T12:00:00", "a timestamp with time zone"),
        ("ordering", "fifo", "none, key or stream"),
        ("stream", " ", "a stream's name"),
        ("consumer", "", "a consumer's name"),
        ("checkpointLocation", "", "a folder of the driver's machine"),
        ("checkpointLocation", "s3://bucket/path", "a folder of the driver's machine"),
    ],
)
def test_a_malformed_value_of_the_source_names_option_value_and_what_is_allowed(
    name, value, allowed
):
    with pytest.raises(PgQueueError) as error:
        parse_source(SOURCE | {name.lower(): value})
    assert f"option {name} is {value!r}" in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("consumers", "a,,b", "names of consumers"),
        ("txnAppId", "", "a name"),
        ("txnVersion", "-1", "a whole number of at least 0"),
    ],
)
def test_a_malformed_value_of_the_sink(name, value, allowed):
    with pytest.raises(PgQueueError) as error:
        parse_sink({"stream": "s", name.lower(): value}, streaming=False)
    assert f"option {name} is {value!r}" in str(error.value)
    assert allowed in str(error.value)


def test_an_unknown_option_is_an_error_with_the_nearest_name():
    with pytest.raises(PgQueueError, match="source has no option maxmesagespertriger") as error:
        parse_source(SOURCE | {"maxmesagespertriger": "1"})
    assert error.value.hint == "did you mean maxMessagesPerTrigger?"


@pytest.mark.parametrize("name", ["dsn", "uri", "dbtable", "host", "query", "driver", "group.id"])
def test_names_of_other_connectors_say_what_to_use(name):
    with pytest.raises(PgQueueError, match=f"no option {name}") as error:
        parse_source(SOURCE | {name: "secret"})
    assert "secret" not in str(error.value)
    assert error.value.hint
    assert "did you mean" not in error.value.hint


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("subscribe", "use stream"),
        ("topic", "did you mean stream"),
        ("kafka.bootstrap.servers", "use url"),
        ("kafka.security.protocol", "goes into url"),
        ("startingOffsets", "use startingPosition"),
        ("maxOffsetsPerTrigger", "use maxMessagesPerTrigger"),
        ("minOffsetsPerTrigger", "use minMessagesPerTrigger"),
    ],
)
@pytest.mark.promise("kafka: with a consumer, other options")
def test_the_options_of_kafka_say_what_to_use(name, use):
    for parse_side in (parse_source, lambda given: parse_sink(given, streaming=True)):
        given = SOURCE if parse_side is parse_source else {"stream": "s"}
        with pytest.raises(PgQueueError, match=f"no option {name.lower()}") as error:
            parse_side(given | {name.lower(): "x"})
        assert use in (error.value.hint or "")


def test_a_url_for_jdbc_says_what_to_give_instead():
    for url, instead in (
        ("jdbc:postgresql://h:5433/d?user=me&password=secret", "give postgresql://h:5433/d as"),
        ("jdbc:postgresql://me:secret@h/d", "give postgresql://host:5432/dbname as"),
        ("JDBC:postgresql:d", "give postgresql://host:5432/dbname as"),
    ):
        with pytest.raises(PgQueueError, match="it is for JDBC") as error:
            parse_source(SOURCE | {"url": url})
        assert instead in (error.value.hint or "")
        assert "secret" not in str(error.value)


def test_the_options_show_no_password():
    url = "postgresql://me:secret@host/d"
    for options in (
        parse_source(SOURCE | {"url": url}),
        parse_sink({"stream": "s", "url": url}, streaming=True),
        parse_stream_source({"stream": "s", "url": url}),
    ):
        assert options.url == url
        assert "secret" not in repr(options)
        assert "stream='s'" in repr(options)


def test_the_options_of_both_take_no_path():
    for parse_side in (parse_source, lambda given: parse_sink(given, streaming=False)):
        with pytest.raises(PgQueueError, match="no option path") as error:
            parse_side(SOURCE | {"path": "/x"} if parse_side is parse_source else {"path": "/x"})
        assert "use stream" in (error.value.hint or "")


def test_a_source_option_is_none_of_the_sink_and_the_other_way_round():
    with pytest.raises(PgQueueError, match="sink has no option waitTime"):
        parse_sink({"stream": "s", "waitTime": "1s"}, streaming=True)
    with pytest.raises(PgQueueError, match="source has no option consumers"):
        parse_source(SOURCE | {"consumers": "a"})
    with pytest.raises(PgQueueError, match="sink has no option maxConnections") as error:
        parse_sink({"stream": "s", "maxConnections": "4"}, streaming=True)
    assert "coalesce()" in (error.value.hint or "")


@pytest.mark.parametrize("missing", ["stream", "consumer"])
def test_a_missing_option(missing):
    with pytest.raises(PgQueueError, match=f"option {missing} is missing"):
        parse_source({name: value for name, value in SOURCE.items() if name != missing})


@pytest.mark.promise("kafka: delta, both or none")
def test_options_that_need_each_other():
    with pytest.raises(PgQueueError, match="startingPosition has no effect without createConsumer"):
        parse_source(SOURCE | {"startingposition": "earliest"})
    few = SOURCE | {"minmessagespertrigger": "10"}
    with pytest.raises(PgQueueError, match="minMessagesPerTrigger is 10, and maxMessagesPerTrigge"):
        parse_source(few | {"maxmessagespertrigger": "9"})
    with pytest.raises(PgQueueError, match="maxTriggerDelay has no effect without minMessagesPer"):
        parse_source(SOURCE | {"maxtriggerdelay": "1 minute"})
    parse_source(few | {"maxmessagespertrigger": "10", "maxtriggerdelay": "1 minute"})
    with pytest.raises(PgQueueError, match="txnAppId and txnVersion must be given together"):
        parse_sink({"stream": "s", "txnappid": "a"}, streaming=False)
    with pytest.raises(PgQueueError, match="are for batch writes"):
        parse_sink({"stream": "s", "txnappid": "a", "txnversion": "1"}, streaming=True)


def test_a_url_that_is_none_is_refused_without_showing_it():
    with pytest.raises(PgQueueError, match="url is not valid") as error:
        parse_source(SOURCE | {"url": "postgresql://me:top secret@host"})
    assert "secret" not in str(error.value)


def test_every_option_says_what_it_does_and_what_is_allowed():
    for option in SOURCE_OPTIONS + SINK_OPTIONS + STREAM_SOURCE_OPTIONS:
        assert option.help
        assert option.allowed


def test_user_and_password_beside_the_url(tmp_path):
    file = tmp_path / "it's"
    file.write_text("top 'secret\\\n")
    for url in ("postgresql://host:5433/d", "host=host port=5433 dbname=d", None):
        given = {"stream": "s", "user": "me"} | ({"url": url} if url else {})
        for how in ({"password": "top 'secret\\"}, {"passwordfile": str(file)}):
            options = parse_sink(given | how, streaming=True)
            found = parse(options.url)
            assert (found["user"], found["password"]) == ("me", "top 'secret\\")
            assert found.get("dbname") == ("d" if url else None)
            assert "secret" not in repr(options)
            assert "secret" not in describe(options.url)
    assert "secret" not in (options.url or ""), "it is read at each connection"
    file.write_text("new")
    assert "password=new" in conninfo(options.url)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"url": "postgresql://me@h/d", "user": "you"}, "the user is given twice"),
        ({"url": "password=secret", "password": "secret"}, "the password is given twice"),
        ({"url": "password=secret", "passwordfile": "/f"}, "the password is given twice"),
        ({"password": "secret", "passwordfile": "/f"}, "password and passwordFile are both given"),
        ({"password": ""}, "option password is not allowed: it must be a password"),
        ({"user": " "}, "option user is ' '"),
    ],
)
def test_a_user_or_password_that_cannot_be_is_refused_and_not_shown(given, says):
    with pytest.raises(PgQueueError, match=says) as error:
        parse_source(SOURCE | given)
    assert "secret" not in str(error.value)


def test_a_password_file_that_cannot_be_read_is_named(tmp_path):
    for content, says in ((None, "cannot be read on .*: No such file"), ("\n", "is empty")):
        file = tmp_path / "password"
        if content is not None:
            file.write_text(content)
        options = parse_source(SOURCE | {"passwordfile": str(file)})
        with pytest.raises(PgQueueError, match=says):
            conninfo(options.url)
