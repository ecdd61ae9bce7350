"""The trigger of Airflow, with stubs of its classes; `tests/test_wheel.py` installs an Airflow."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psycopg
import pytest

from spark_pgqueue.client import Client


@dataclass
class Event:
    """A TriggerEvent, or a Connection."""

    payload: Any

    def get_uri(self) -> str:
        return self.payload


def trigger(monkeypatch: pytest.MonkeyPatch, hook: type, **given: Any) -> Any:
    """A trigger for the stream s and its consumer c, in an Airflow with this BaseHook."""

    def sync_to_async(call: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def called(*args: Any) -> Any:
            return call(*args)

        return called

    stubs = {
        "airflow.providers.common.messaging.providers.base_provider": {
            "BaseMessageQueueProvider": object
        },
        "airflow.triggers.base": {"BaseEventTrigger": object, "TriggerEvent": Event},
        "airflow.sdk": {"BaseHook": hook},
        "asgiref.sync": {"sync_to_async": sync_to_async},
    }
    for name, content in stubs.items():
        stub = ModuleType(name)
        vars(stub).update(content)
        monkeypatch.setitem(sys.modules, name, stub)
    spec = importlib.util.find_spec("spark_pgqueue.airflow.triggers")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)  # of this test alone
    spec.loader.exec_module(module)
    return module.PgQueueTrigger(stream="s", consumer="c", **given)


def first_event(made: Any) -> Any:
    """The payload of the first event of a trigger."""

    async def first() -> Any:
        events = made.run()
        try:
            return (await asyncio.wait_for(anext(events), 30)).payload
        finally:
            await events.aclose()

    return asyncio.run(first())


@pytest.mark.parametrize("is_older", [False, True])
def test_a_connection_of_airflow_is_read_in_the_event_loop_of_all_triggers(
    queue: Client, url: str, monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    """Otherwise, answers of the supervisor reach the wrong one, and all triggers end."""

    class Older:
        @classmethod
        def get_connection(cls, conn_id: str) -> Event:
            assert (is_older, conn_id) == (True, "queue")
            asyncio.get_running_loop()
            return Event(url)

    class Hook(Older):
        @classmethod
        async def aget_connection(cls, conn_id: str) -> Event:
            assert conn_id == "queue"
            return Event(url)

    queue.send("s", "x")
    made = trigger(monkeypatch, Older if is_older else Hook, conn_id="queue")
    assert [each["data"] for each in first_event(made)["messages"]] == ["x"]


def test_an_event_has_only_what_each_part_of_airflow_can_hold(
    queue: Client, conn: psycopg.Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """msgspec encodes no integer above 64 bits, and a column of JSON has no infinity."""
    headers = '{"text": "a", "n": 1e30, "x": 1e400, "part": [1, {"ü": true}], "none": null}'
    long = f"1{'0' * 400}.5"
    conn.execute(
        "select pgqueue.send('s', 'x', p_headers => %s::jsonb || %s::jsonb)",
        [headers, f'{{"long": {long}}}'],
    )
    monkeypatch.setenv("PGQUEUE_URL", url)
    event = first_event(trigger(monkeypatch, object))
    found = json.loads(json.dumps(event, allow_nan=False))["messages"][0]["headers"]
    assert found == {
        "text": "a",
        "n": f"1{'0' * 30}",
        "x": f"1{'0' * 400}",
        "part": '[1, {"ü": true}]',
        "none": None,
        "long": "Infinity",
    }
