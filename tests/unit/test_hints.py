"""Hints for unknown names: the nearest name or all names, whatever was written, and never a gap."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import chain, product
from typing import Any

import psycopg
import pytest
import typer
from typer.testing import CliRunner

from spark_pgqueue import nearest
from spark_pgqueue.client import AsyncClient, Client
from spark_pgqueue.command_line import cli
from spark_pgqueue.command_line.app import names_of
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options import checking
from spark_pgqueue.spark.options.sink import SINK_OPTIONS
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS
from spark_pgqueue.worker.consumer import options_of
from spark_pgqueue.worker.options import Options

ODD = ["", " ", "?", "zzz", "%s", "{}", "{a,b}", 'a"b', "it's", "x\ny", "ä" * 300, "🙂", "^", "\\"]
CALLS = ("send", "receive", "create_consumer", "create_stream", "alter_consumer", "nack")


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
            assert "Did you mean ?" not in hint, (call, word)
            assert hint.split("Available: ")[1].strip(" .,"), (call, word)


def test_a_setting_of_another_queue_gets_its_name_here(conn: psycopg.Connection) -> None:
    """In each spelling, for each name of a setting in the table of Python."""
    conn.execute("select pgqueue.create_stream('s'), pgqueue.create_consumer('s', 'c')")
    query = "select name, of_what from _pgqueue.settings()"
    settings = dict(conn.execute(query).fetchall())
    seen = set()
    for meaning in nearest.MEANINGS:
        for name in [each for each in meaning.ours.split()[:1] if each in settings]:
            call = (
                "alter_stream('s', %s)"
                if settings[name] == "stream"
                else "alter_consumer('s', 'c', %s)"
            )
            for word in meaning.theirs.split():
                for spelled in (word, word.replace("_", "-"), word.title().replace("_", "")):
                    hint = hint_of(conn, call, json.dumps({spelled: 1}))
                    assert hint.startswith(f"Did you mean {name}? Available: "), spelled
            seen.add(name)
    assert len(seen) == 8


def test_hints_of_python() -> None:
    for names in ([], ["max_bytes"], [*Options.__dataclass_fields__]):
        for word in ODD:
            hint = nearest.hint(word, names)
            assert hint == f"available: {', '.join(names) or 'none'}", word
    with pytest.raises(PgQueueError) as error:
        options_of({"concurency": timedelta(1)})
    assert error.value.hint == "did you mean concurrency?"


def test_a_setting_as_an_argument_gets_its_place() -> None:
    create: Any = partial(Client.__new__(Client).create_consumer, "s", "c")
    for name in ("fair", "max_deliver_count", "max_attempts"):
        with pytest.raises(TypeError) as error:
            create(**{name: 5})
        assert 'settings={"NAME": VALUE}' in error.value.__notes__[-1], name
    with pytest.raises(TypeError) as error:
        create(filter="$.data")
    assert error.value.__notes__ == ["hint: did you mean where?"]


def interfaces() -> dict[str, tuple[list[str], Callable[[str], str]]]:
    """The names of options by interface, and what each says of an unknown one."""
    found: dict[str, tuple[list[str], Callable[[str], str]]] = {}

    def refused(call: Callable[[str], Any], error: type[Exception]) -> Callable[[str], str]:
        def hint(name: str) -> str:
            with pytest.raises(error) as caught:
                call(name)
            notes = getattr(caught.value, "__notes__", [])
            return getattr(caught.value, "hint", None) or "".join(notes)

        return hint

    def called(kind: Any, method: str) -> Callable[[str], Any]:
        def call(name: str) -> None:
            value = getattr(kind.__new__(kind), method)("s", "c", **{name: 1})
            asyncio.run(value)  # of AsyncClient; that of Client has raised

        return call

    found["worker"] = (
        [*Options.__dataclass_fields__],
        refused(lambda name: options_of({name: 1}), PgQueueError),
    )
    for kind, method in product((Client, AsyncClient), CALLS):
        names = [*inspect.signature(getattr(Client, method)).parameters][1:]
        found[f"{kind.__name__}.{method}"] = names, refused(called(kind, method), TypeError)
    for side, table in (("source", SOURCE_OPTIONS), ("sink", SINK_OPTIONS)):
        found[f"Spark's {side}"] = (
            [each.name for each in table],
            refused(
                lambda name, table=table, side=side: checking.parse({name: "1"}, table, side),
                PgQueueError,
            ),
        )
    for words in ("send", "receive", "consumer create", "stream create", "work", "nack"):
        command: Any = typer.main.get_command(cli.app)
        for word in words.split():
            command = command.get_command(None, word)
        found[f"pgqueue {words}"] = names_of(command), partial(typed, words)
    return found


def typed(words: str, name: str) -> str:
    done = CliRunner().invoke(
        cli.app, [*words.split(), "--" + name.replace("_", "-"), "1"], env={"COLUMNS": "500"}
    )
    assert done.exit_code == 2
    return " ".join(re.sub(r"[│╭╮╰╯─]", "", done.stderr).split())


def test_an_option_of_another_queue_gets_its_name_here_in_each_interface(
    conn: psycopg.Connection,
) -> None:
    """Each name of the table: ours where the interface has it, and else where it is."""
    there = {nearest.plain(name) for names, _ in interfaces().values() for name in names}
    settings = conn.execute("select name from _pgqueue.settings()").fetchall()
    there |= {nearest.plain(name) for (name,) in settings}
    shown = 0
    for meaning in nearest.MEANINGS:
        missing = [name for name in meaning.ours.split() if nearest.plain(name) not in there]
        assert missing == [], "a name that no interface has"
    for interface, (names, hint) in interfaces().items():
        known = {nearest.plain(each): each for each in names}
        others = checking.FOREIGN if interface.startswith("Spark") else ()
        given = {*known, *map(nearest.plain, others)}
        words = [each.theirs.split() for each in nearest.MEANINGS]
        if interface.startswith("pgqueue"):  # they take longer
            words = [each[:2] for each in words]
        for word in set(chain(*words)):
            if nearest.plain(word) in given:
                continue
            meant = [each for each in nearest.MEANINGS if each.has(word)]
            names_here = [nearest.plain(name) for each in meant for name in each.ours.split()]
            ours = [known[name] for name in names_here if name in known]
            first = meant[0].place.format(*meant[0].ours.split()[:1])
            expected = f"did you mean {ours[0]}?" if ours else first
            assert expected in hint(word), (interface, word)
            shown += 1
    assert shown > 1500


def test_what_the_table_says_of_other_places_is_there(conn: psycopg.Connection) -> None:
    functions = {name for (name,) in conn.execute(
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace")}  # fmt: skip
    for place in {each.place for each in nearest.MEANINGS}:
        for function in re.findall(r"\b[a-z]+_[a-z_]+\b", place.replace("max_messages", "")):
            assert function in functions, place
        for command in re.findall(r"pgqueue ((?:[a-z]+ ?)+)", place):
            assert CliRunner().invoke(cli.app, [*command.split(), "--help"]).exit_code == 0, place
