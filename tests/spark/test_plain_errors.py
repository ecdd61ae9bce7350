"""What users read when something is wrong: our sentence first, and no traceback of Python's."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo
from pyspark.errors import PySparkException

from tests.spark.conftest import Queue

pytestmark = pytest.mark.spark

BEFORE = 160
"""Characters that Spark may put before it: the names of its errors. A query adds its two ids."""


def text_of(call: Callable[[], object]) -> str:
    with pytest.raises(PySparkException) as error:
        call()
    return str(error.value)


def check(text: str, sentence: str, before: int = BEFORE) -> None:
    assert sentence in text
    assert text.index(sentence) < before, text[: text.index(sentence)]
    assert "Hint: " in text
    assert "Traceback" not in text
    assert 'File "' not in text


def test_an_error_begins_with_what_is_wrong_wherever_it_comes_from(queue: Queue):
    """At load, in the source's process, on an executor that reads, in a sink and in a write."""
    queue.create("s", "c")
    check(text_of(lambda: queue.load("nope", "c")), "[PQ001] unknown stream 'nope'")
    one = queue.spark.range(1).selectExpr("'x' as data")
    check(text_of(lambda: queue.write(one, "nope")), "[PQ001] unknown stream 'nope'")

    reader = queue.spark.readStream.format("pgqueue").schema("data string")
    refused = queue.collect(reader.options(url=queue.url, stream="s").load())
    sentence = "the schema of pgqueue cannot be chosen"
    check(text_of(lambda: refused.awaitTermination(60)), sentence, BEFORE + 150)

    queue.send("s", 1, 10)
    queue.collect(queue.load("s", "c")).awaitTermination()
    queue.sql("select pgqueue.drop_consumer('s', 'c')")
    queue.sql("select pgqueue.create_consumer('s', 'c')")
    query = queue.collect(queue.load("s", "c"))
    sentence = "[PQ005] the checkpoint (at claim "
    check(text_of(lambda: query.awaitTermination(60)), sentence, BEFORE + 150)
    check(str(query.exception()), sentence)

    def delete(batch, batch_id):
        queue.sql("delete from pgqueue.messages where seq <= 13")
        check(text_of(batch.collect), "[PQ010] 3 messages of stream s were deleted", BEFORE + 150)
        raise RuntimeError("seen")

    queue.send("s", 11, 20)
    query = queue.collect(queue.load("s", "c"), "another", each=delete)
    assert "seen" in text_of(lambda: query.awaitTermination(60))


@pytest.mark.promise("kafka: with a consumer, kafka.security.*")
def test_user_and_password_by_options_of_their_own(queue: Queue, tmp_path: Path):
    """From a file too; and the password is in no error and no plan."""
    queue.create("s", "c")
    queue.sql("drop role if exists pgqueue_me")
    queue.sql("create role pgqueue_me superuser login password 'top secret'")
    (tmp_path / "password").write_text("top secret\n")
    try:
        url = make_conninfo(queue.url, user="")
        how = {"url": url, "user": "pgqueue_me"}
        one = queue.spark.range(1).selectExpr("'1' as data")
        queue.write(one, "s", **how, password="top secret")
        frame = queue.load("s", "c", **how, passwordFile=str(tmp_path / "password"))
        queue.collect(frame).awaitTermination()
        assert queue.data() == [1]
        frame = queue.load("s", "c", **how, password="top secret")
        with contextlib.redirect_stdout(io.StringIO()) as explained:
            frame.explain(True)
        assert "pgqueue" in explained.getvalue()
        assert "secret" not in explained.getvalue()
        text = text_of(lambda: queue.load("nope", "c", **how, password="top secret"))
        assert "unknown stream" in text
        assert "secret" not in text
    finally:
        queue.sql("drop role pgqueue_me")
