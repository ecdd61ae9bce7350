"""Hints for unknown names: the nearest name or all names, whatever was written, and never a gap."""

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from spark_pgqueue import nearest
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.worker.consumer import options_of
from spark_pgqueue.worker.options import FOREIGN, Options

ODD = ["", " ", "?", "zzz", "%s", "{}", "{a,b}", 'a"b', "it's", "x\ny", "ä" * 300, "🙂", "^", "\\"]
SETTINGS = {  # of other queues, in the spellings of several languages
    "max_deliver_count": "max_attempts maxAttempts max-retries MaxReceiveCount retries",
    "visibility_timeout": "vt VisibilityTimeout ack_deadline ackWait lock-duration",
    "backoff_base": "retry_delay retryDelay",
    "max_backlog": "x-max-length maxlength",
    "max_in_flight": "max_ack_pending prefetch_count",
}


def hint_of(conn: psycopg.Connection, call: str, *values: Any) -> str:
    with pytest.raises(psycopg.Error) as error, conn.transaction():
        conn.execute(f"select pgqueue.{call}".encode(), values)
    assert (error.value.sqlstate or "")[:2] == "PQ", (call, values, error.value)
    return error.value.diag.message_hint or ""


def test_hints_of_sql(conn: psycopg.Connection) -> None:
    conn.execute("create table public.bare ()")
    conn.execute("create table public.one (id int primary key)")
    conn.execute("select pgqueue.create_stream('s', 'json'), pgqueue.create_consumer('s', 'c')")
    for word in ODD:
        setting = json.dumps({word: 1})
        for call, values in (
            ("alter_consumer('s', 'c', %s)", [setting]),
            ("alter_stream('s', %s)", [setting]),
            ("create_consumer('s', 'd', p_settings => %s)", [setting]),
            ("drop_schedule('s', %s)", [word]),
            ("capture('bare', 's', p_keys => '{}', p_columns => %s)", [[word]]),
            ("capture('one', 's', p_keys => '{}', p_columns => %s)", [[word]]),
        ):
            hint = hint_of(conn, call, *values)
            assert "Is it ?" not in hint, (call, word)
            assert hint.split("There are: ")[1].strip(" .,"), (call, word)
    for meant, others in SETTINGS.items():
        for word in others.split():
            hint = hint_of(conn, "alter_consumer('s', 'c', %s)", json.dumps({word: 1}))
            assert hint.startswith(f"Is it {meant}? There are: "), word


def test_hints_of_python() -> None:
    for names in ([], ["max_bytes"], [*Options.__dataclass_fields__]):
        for word in ODD:
            hint = nearest.hint(word, names)
            assert hint == f"there are: {', '.join(names) or 'none'}", word
    for word, meant in (("maxRetries", "max_deliver_count"), ("max-attempts", "max_deliver_count"),
                        ("concurency", "concurrency"), ("visibilityTimeout", "visibility_timeout"),
                        ("max_workers", "concurrency"), ("batchSize", "batch")):  # fmt: skip
        with pytest.raises(PgQueueError) as error:
            options_of({word: timedelta(1)})
        assert meant in (error.value.hint or ""), word
    assert not {*FOREIGN} & {*Options.__dataclass_fields__}, "an option is no foreign name"
