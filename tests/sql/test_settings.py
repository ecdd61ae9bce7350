"""Settings of consumers and streams: changed while they are in use, all or nothing."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def alter_settings(conn: Conn, settings: dict[str, Any], name: str = "c") -> None:
    value(conn, "alter_consumer", "s", name, Jsonb(settings))


def alter_stream(conn: Conn, settings: dict[str, Any], name: str = "s") -> None:
    value(conn, "alter_stream", name, Jsonb(settings))


def settings_of(conn: Conn, name: str = "c") -> dict[str, Any]:
    """Its settings, without those that `consumer` gives to each."""
    found = one(conn, "select settings from pgqueue.consumer_settings where consumer = %s", name)
    return {name: each for name, each in found.items() if (name, each) not in AT_ONCE.items()}


@pytest.mark.parametrize("of_what", SETTINGS)
def test_each_setting_is_one_that_was_given_or_has_its_default(conn: Conn, of_what: str) -> None:
    """A value that equals the default is given, too; null takes back what was given."""
    value(conn, "create_stream", "j", "json")
    value(conn, "create_consumer", "j", "c")
    value(conn, "pause", "j", "c")  # or some could not be changed
    look, change = {
        "consumer": ("consumer_settings", "alter_consumer"),
        "stream": ("stream_stats", "alter_stream"),
    }[of_what]
    names = ("j", "c")[: 1 + (of_what == "consumer")]

    def shown() -> tuple[dict[str, Any], dict[str, Any]]:
        (row,) = rows(conn, f"select settings, defaults from pgqueue.{look} where stream = 'j'")
        return row.settings, row.defaults

    def stored() -> Any:
        return one(conn, f"select to_jsonb(t) from pgqueue.{of_what}s t where name = %s", names[-1])

    before = stored()
    given, defaults = shown()
    listed = rows(conn, "select name from _pgqueue.settings() where of_what = %s", of_what)
    assert (given, defaults.keys()) == ({}, {row.name for row in listed})
    other = defaults.keys() ^ SETTINGS[of_what].keys()
    assert not other, f"SETTINGS in tests/sql/queue.py needs a value of each setting: {other}"
    for name, each in SETTINGS[of_what].items():
        needed = NEEDS.get(name, {})
        for new in (each, defaults[name]):
            if new is not None:  # a default that is none can be had in one way alone
                expected = needed | {name: new}
                value(conn, change, *names, Jsonb(expected))
                rest = {key: old for key, old in defaults.items() if key not in expected}
                assert shown() == (expected, rest), name
        value(conn, change, *names, Jsonb(dict.fromkeys([*needed, name])))
        assert shown() == ({}, defaults), name
        assert stored() == before, name


def test_the_profile_of_a_consumer_is_that_of_its_settings(conn: Conn) -> None:
    """With each setting, in each order: a function that serves it asks nothing but this word."""
    profiles = {}
    query = "select profile from pgqueue.consumers where name = %s"
    for ordering in ("none", "key"):
        for name, each in SETTINGS["consumer"].items():
            made = f"{ordering} {name}"
            consumer(conn, made, ordering, p_settings=NEEDS.get(name, {}) | {name: each})
            profiles[ordering, name] = one(conn, query, made)
    simple = {"visibility_timeout", "max_deliver_count", "on_full"}
    simple |= {"backoff", "backoff_base", "backoff_cap", "backoff_jitter"}
    of_keys = {"fair", "per_key_limit"}
    rates = {"per_key_interval", "per_key_burst"}
    for (ordering, name), profile in profiles.items():
        calm = name in simple or (name in of_keys and ordering == "none")
        keyed = ordering == "key" or name in of_keys | rates
        assert profile == ("simple" if calm else "careful") + " keyed" * keyed, (
            f"{name}, ordering={ordering}: if a claim or an acknowledgement checks it, the column "
            "profile in sql/base/consumers.sql has it; else it is one of `simple` in this test"
        )


def test_the_next_failure_goes_by_the_new_max_deliver_count(conn: Conn) -> None:
    """Also that of a claim that was open when it changed."""
    consumer(conn, p_settings=Jsonb({"max_deliver_count": 5}))
    assert settings_of(conn) == {"max_deliver_count": 5}
    seq = send(conn)
    claim = claim_of(receive(conn))
    alter_settings(conn, {"max_deliver_count": 1})
    value(conn, "nack", claim)
    assert states(conn) == {seq: "dead"}


@pytest.mark.promise("feature: changed while in use")
def test_the_next_claim_goes_by_the_new_visibility_timeout_and_an_open_one_by_its_own(
    conn: Conn,
) -> None:
    consumer(conn)
    send_all(conn, ["x"] * 2)
    first = claim_of(receive(conn, 1))
    alter_settings(conn, {"visibility_timeout": "1 hour"})
    second = claim_of(receive(conn, 1))
    left = dict(
        conn.execute(
            "select claim_id, lease_until - clock_timestamp() < interval '1 minute'"
            " from pgqueue.message_states where state = 'claimed'"
        ).fetchall()
    )
    assert left == {first: True, second: False}
    assert settings_of(conn) == {"visibility_timeout": "01:00:00"}
    alter_settings(conn, {"visibility_timeout": None})
    assert settings_of(conn) == {}


UNIT = ", which has no unit: write 500 ms, 30 s or 5 minutes"
NO_SETTINGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_deliver_cuont": 5}, ["'max_deliver_cuont'", "Did you mean max_deliver_count?"]),
    ({"max_attempts": 5}, ["Did you mean max_deliver_count?"]),
    ({"maxReceiveCount": 5}, ["Did you mean max_deliver_count?"]),
    ({"retries": 5}, ["Did you mean max_deliver_count?"]),
    ({"vt": 5}, ["Did you mean visibility_timeout?"]),
    ({"zzz": 1}, ["'zzz'", "Available: ", "visibility_timeout"]),
    ({"visibility_timeout": 30}, ["visibility_timeout", "longer than 0", "not 30", UNIT]),
    ({"visibility_timeout": "30"}, ['not "30"', UNIT]),
    ({"keep_history": "1.5"}, ['not "1.5"', UNIT]),
    ({"visibility_timeout": "11 years"}, ["up to 10 years", "11 years"]),
    ({"visibility_timeout": "0 s"}, ["visibility_timeout must be null (default: "]),
    ({"visibility_timeout": "soon"}, ['not "soon"']),
    ({"visibility_timeout": {}}, ["not {}"]),
    ({"max_deliver_count": 1.5}, ["at least 1", "not 1.5"]),
    ({"max_deliver_count": 10**30}, ["not 1000"]),
    ({"max_deliver_count": 2, "visibility_timeout": "x"}, ["visibility_timeout"]),
]


def test_what_is_no_setting_or_no_value_of_it_is_refused_and_nothing_changes(conn: Conn) -> None:
    consumer(conn)
    before = rows(conn, "select * from pgqueue.consumers")
    for settings, says in NO_SETTINGS:
        for new in (False, True):
            with pytest.raises(psycopg.Error) as caught:
                consumer(conn, "d", p_settings=Jsonb(settings)) if new else alter_settings(
                    conn, settings
                )
            assert caught.value.sqlstate == "PQ003", settings
            assert caught.value.diag.column_name == "p_settings", settings
            text = f"{caught.value.diag.message_primary} {caught.value.diag.message_hint}"
            for part in says:
                assert part in text
            assert ("unit" in text) == (UNIT in says), settings
        assert rows(conn, "select * from pgqueue.consumers") == before, settings


def test_settings_are_an_object(conn: Conn) -> None:
    consumer(conn)
    for settings in (None, [], 1, "x"):
        with pytest.raises(psycopg.Error, match="p_settings must be a JSON object"):
            value(conn, "alter_consumer", "s", "c", Jsonb(settings))
    with pytest.raises(psycopg.Error, match="p_settings must be a JSON object"):
        value(conn, "alter_stream", "s", None)


def test_a_group_has_no_settings_of_claims(conn: Conn) -> None:
    value(conn, "create_group", "s", "g", 2)
    with pytest.raises(psycopg.Error, match="a group does not support these settings"):
        alter_settings(conn, {"max_deliver_count": 2}, "g")
    alter_settings(conn, {"max_deliver_count": None}, "g")
    shown = rows(conn, "select settings, defaults from pgqueue.consumer_settings")
    assert shown == [({}, {})]


def test_what_is_sent_goes_by_the_streams_new_settings(conn: Conn) -> None:
    consumer(conn)
    send(conn, "x" * 10)
    alter_stream(conn, {"max_bytes": 5, "dedup_window": "1 day", "notify": False})
    with raises("PQ004"):
        send(conn, "x" * 10)
    first = send(conn, "y", p_dedup_key="k")
    assert send(conn, "z", p_dedup_key="k") == first
    assert one(conn, "select settings from pgqueue.stream_stats") == {
        "max_bytes": 5, "dedup_window": "1 day", "notify": False,
    }  # fmt: skip
    alter_stream(conn, {"max_bytes": None})
    assert len(receive(conn)) == 2
    assert send(conn, "x" * 10)


def test_a_stream_takes_no_more_than_the_one_that_it_is_copied_to(conn: Conn) -> None:
    value(conn, "create_stream", "t")
    call(conn, "bind", "s", "#", "t")
    for name, settings in (("s", {"max_bytes": 20000000}), ("t", {"max_header_bytes": 100})):
        with pytest.raises(psycopg.Error, match="is bound to stream"):
            alter_stream(conn, settings, name)
    alter_stream(conn, {"max_bytes": 20000000}, "t")
    alter_stream(conn, {"max_bytes": 20000000}, "s")


def test_limits_and_a_binding_that_change_at_once_fit_each_other(
    conn: Conn, session: Session
) -> None:
    """Who binds looks at the limits after whoever changes them."""
    value(conn, "create_stream", "t")
    altering, binding = session(), session()
    altering.execute("begin")
    alter_stream(altering, {"max_bytes": 10}, "t")
    binding.execute("set statement_timeout = '20s'")
    with binding.pipeline():
        waiting = binding.execute("select pgqueue.bind('s', '#', 't')")
        wait_for_a_lock(conn)
        altering.execute("commit")
        with pytest.raises(psycopg.Error, match="accepts 16777216 bytes"):
            waiting.fetchone()


def test_a_limit_and_a_schedule_that_are_made_at_once_wait_for_each_other(
    conn: Conn, session: Session
) -> None:
    """In one order of locks: neither ends as a deadlock."""
    consumer(conn)
    holder, limiter, planner = session(), session(), session()
    holder.execute("begin")
    holder.execute("select from pgqueue.consumers for update")
    with ThreadPoolExecutor(2) as pool:
        limited = pool.submit(alter_settings, limiter, {"max_backlog": 5})
        wait_for_a_lock(conn)
        planned = pool.submit(value, planner, "create_schedule", "s", "h", "@daily", p_data="x")
        wait_for_a_lock(conn, 2)
        holder.execute("commit")
        limited.result(20)
        planned.result(20)
    assert settings_of(conn) == {"max_backlog": 5}


def test_claims_go_on_while_a_setting_is_being_changed(conn: Conn, session: Session) -> None:
    consumer(conn)
    send(conn)
    altering = session()
    altering.execute("begin")
    alter_settings(altering, {"max_deliver_count": 3})
    conn.execute("set statement_timeout = '5s'")
    claim = claim_of(receive(conn))
    assert value(conn, "nack", claim) == 1
    send(conn)
    altering.execute("commit")
