"""All commands of `pgqueue` there are, by what holds for every one of them; and those that look."""

import functools
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer.main
from typer.testing import CliRunner

from spark_pgqueue.client import Client
from spark_pgqueue.command_line import app, cli, completion
from spark_pgqueue.command_line.app import EXIT_CODES, MODULES, PANELS, as_commands
from tests.processes import EACH, started
from tests.unit.test_cli import completed

Run = Callable[..., str]

SQL = Path(__file__).parents[2] / "sql"
PAGE = (SQL / "guide" / "command-line.md").read_text()

# They print no result of their own: another format, a page or a table that lives.
WITHOUT_JSON = {"sql", "deploy", "metrics", "web", "top", "demo"}


@functools.cache
def commands() -> list[tuple[str, Any]]:
    """Every command, with the words by which it is called."""

    def walk(words: list[str], command: Any) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(words), command
        for name, each in getattr(command, "commands", {}).items():
            yield from walk([*words, name], each)

    return list(walk([], typer.main.get_command(cli.app)))


def test_every_command_prints_json() -> None:
    found = {name for name, each in commands() if "--json" not in each_option(each)}
    assert found == WITHOUT_JSON


def each_option(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def test_every_command_stands_in_the_help_under_a_heading(run: Run) -> None:
    """And every one has a help of its own."""
    shown = run("--help")
    assert "─ Commands ─" not in shown
    headings = re.findall(r"^╭─ (.+?) ─+╮$", shown, re.MULTILINE)
    assert headings == ["Options", *PANELS]
    there = {name.split()[0] for name, _ in commands()}
    assert {name for names in PANELS.values() for name in names} == there
    order = [shown.index(f"│ {name} ") for names in PANELS.values() for name in names]
    assert order == sorted(order)
    for name, command in commands():
        assert command.help, name


def test_a_command_is_found_without_the_others() -> None:
    """`MODULES` has the modules of each name, and no more."""
    found: dict[str, set[str]] = {}
    for name, command in commands():
        module = command.callback.__module__.rpartition(".")[2]
        found.setdefault(name.split()[0], set()).add(module)
    assert {name: set(modules) for name, modules in MODULES.items()} == found


# What a command needs only for a table, for Arrow, for Spark, or for another command.
DEAR = (
    "rich.console", "pyarrow", "pyspark", "adbc_driver_manager", "multiprocessing",
    "http.server", "h11",
    "spark_pgqueue.metrics", "spark_pgqueue.spark", "spark_pgqueue.worker", "spark_pgqueue.archive",
    "spark_pgqueue.command_line.cli", "spark_pgqueue.command_line.commands.work",
)  # fmt: skip


def test_a_short_command_imports_only_what_it_needs(run: Run, queue: Client) -> None:
    """Half of its time is imports: a tenth of a second would go to these."""
    short = ("send s --data x", "stream create t", "install", "receive s c")
    script = f"{EACH}\nprint(*sys.modules, file=sys.stderr)"
    words = [sys.executable, "-c", script, *short]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stderr
    assert said.count("ended with 0") == len(short), said
    assert not {*DEAR} & {*said.split()}


def test_every_stream_and_consumer_is_completed() -> None:
    """Where a command takes the name of one that there is."""
    for name, command in commands():
        for each in command.params:
            if each.metavar in ("STREAM", "CONSUMER") and "create" not in name:
                assert each._custom_shell_complete is not None, (name, each.metavar)


def test_commands_that_say_nothing_say_an_object(run: Run, queue: Client) -> None:
    """One object a command, whatever it says without --json."""
    with queue._statements.connection().cursor() as cursor:
        cursor.execute("create table t (id int primary key)")
    script = """
        stream create t dedup-window=1h | {"stream": "t"}
        stream set t notify=off | {"stream": "t", "settings": {"notify": "off"}}
        stream bind t # s | {"stream": "t", "topic": "#", "to_stream": "s"}
        stream unbind t # s | {"stream": "t", "topic": "#", "to_stream": "s"}
        consumer create t d | {"stream": "t", "consumer": "d"}
        consumer set t d max-deliver-count=3 |
            {"stream": "t", "consumer": "d", "settings": {"max_deliver_count": "3"}}
        send t --data x | {"stream": "t", "seq": 1}
        consumer seek t d latest | {"stream": "t", "consumer": "d", "forgotten": 1}
        consumer replay t d earliest | {"stream": "t", "consumer": "d", "again": 1}
        consumer pause t d | {"stream": "t", "consumer": "d", "paused": true}
        consumer resume t d | {"stream": "t", "consumer": "d", "paused": false}
        purge t d --yes | {"stream": "t", "consumer": "d", "forgotten": 1}
        consumer drop t d --yes | {"stream": "t", "consumer": "d", "dropped": true}
        consumer drop t d --if-exists | {"stream": "t", "consumer": "d", "dropped": false}
        group create t g | {"stream": "t", "group": "g"}
        consumer seek t g latest | {"stream": "t", "consumer": "g", "forgotten": 0}
        consumer drop t g --yes | {"stream": "t", "consumer": "g", "dropped": true}
        schedule create t n --cron @yearly --data x |
        schedule pause t n | {"stream": "t", "schedule": "n", "paused": true}
        schedule resume t n |
        schedule times --cron @yearly --count 1 |
        schedule drop t n --yes | {"stream": "t", "schedule": "n", "dropped": true}
        capture t t | {"table": "t", "stream": "t"}
        release t t | {"table": "t", "stream": "t"}
        maintain --staged-age 2days |
        doctor |
        install |
        stream drop t --yes | {"stream": "t", "dropped": true}
        stream drop t --if-exists | {"stream": "t", "dropped": false}
    """
    for line in re.sub(r"\|\n +\{", "| {", script).strip().splitlines():
        command, _, expected = line.strip().partition(" |")
        if command.startswith("doctor"):  # it may fail here, and says so in objects
            printed = CliRunner().invoke(cli.app, ["doctor", "--json"]).stdout
        else:
            printed = run(command, "--json")
        said = [json.loads(each) for each in printed.splitlines()]
        assert said, command
        assert all(isinstance(each, dict) for each in said), command
        if expected.strip():
            assert said == [json.loads(expected)], command


# Hints that no command of this program meets: they are for who writes SQL.
FOR_SQL = (
    "pgqueue.reserve",
    "next_offset that read_partitions returned",
    "lease_partitions returned",
    "Renew leases with lease_partitions",
    "read_to returned",
)


def test_hints_that_name_functions_are_commands(url: str) -> None:
    """All those in sql/, in the words of this program."""
    with psycopg.connect(url) as conn:
        functions = {
            name
            for (name,) in conn.execute(
                "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
            )
        }
    seen = 0
    for file in sorted(SQL.glob("*/*.sql")):
        for found in re.findall(r"hint = ((?:format\()?'(?:[^']|'')*')", file.read_text()):
            hint = found.removeprefix("format(")[1:-1].replace("''", "'")
            if any(each in hint for each in FOR_SQL):
                continue
            for kind in ("consumer", "group"):
                filled = hint.replace("create_%s", f"create_{kind}").replace("%L", "'x'")
                said = as_commands(filled.replace("%I", "x").replace("%s", "x"))
                named = {
                    word
                    for word in re.findall(r"\w+", said)
                    if word in functions and ("_" in word or f"{word}(" in said)
                }
                assert not named, (file.name, said)
                assert "pgqueue." not in said, (file.name, said)
                assert not re.search(r"\b(select|Call)\b (?!name)", said), (file.name, said)
            seen += filled != said
    assert seen > 8


def test_exit_codes_are_documented_in_one_place_and_the_page_says_the_same(run: Run) -> None:
    shown = " ".join(run("--help").split())
    for code, what in EXIT_CODES.items():
        assert f"{code}: {what}." in shown
        assert f"| {code} | {what} |" in PAGE


def test_exit_codes(url: str, run: Run, queue: Client, tmp_path: Path) -> None:
    """0 to 3; a worker that is stopped has done its work."""
    queue.create_consumer("s", "new")
    for code, arguments in enumerate(
        ("stream list", "stream drop no --yes", "stream drop", "receive s new --exit-code")
    ):
        assert CliRunner().invoke(cli.app, arguments.split()).exit_code == code
    (tmp_path / "jobs.py").write_text("def work(message): print(message.data, flush=True)\n")
    work = partial(started, "work", "jobs:work", "s", environment={"PYTHONPATH": str(tmp_path)})
    with work("c", url=url) as one, work("new", url=url) as two:
        queue.send("s", "b")
        for process, number in ((one, signal.SIGINT), (two, signal.SIGTERM)):
            assert process.stdout is not None
            assert process.stdout.readline()
            process.send_signal(number)
            process.communicate(timeout=30)
            assert process.returncode == 0, number


def test_an_error_because_of_sigterm_is_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a statement that the signal interrupted; also where an error would be passed over."""

    def work() -> None:
        app._Terminated.came = True
        raise OSError("the connection is lost")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(app._Terminated, "came", False)
    try:
        with pytest.raises(OSError, match="is lost"):
            app.repeat(work, timedelta(0), lambda _: True)
        assert CliRunner().invoke(cli.app, ["stream", "drop", "no", "--yes"]).exit_code == 0
    finally:
        signal.signal(signal.SIGTERM, before)  # a command is alone in its process


def test_streams_are_listed_with_what_they_hold_from_the_beginning(run: Run, queue: Client) -> None:
    """Also before the planner has an estimate, and with segments that it does not know."""
    queue.send_batch("s", ["x"] * 6)
    assert [(each.messages, each.sent) for each in queue.streams()] == [(6, 6)]
    assert re.search(r"\bs\b.*\b6\b.*\b6\b", run("stream list").splitlines()[1])
    queue.create_stream("kept")
    queue.set_retention("kept", messages=100)
    queue.send_batch("kept", ["x"] * 7)
    assert {each.name: each.messages for each in queue.streams()} == {"s": 6, "kept": 7}


def test_names_are_completed_and_nothing_is_said_without_a_database(
    run: Run, queue: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.create_stream("stock")
    queue.create_consumer("stock", "desk")
    assert completed("pgqueue send st", 2) == ["stock"]
    names = ["my $(touch evil); 'x\"", "my stream", "my\\"]
    for name in names:
        queue.create_stream(name)
    quoted = completed("pgqueue send my", 2)
    assert shlex.split(" ".join(quoted)) == names
    assert completed("pgqueue send my", 2, "zsh") == ["_arguments '*: :((\"my stream\"))'"]
    assert completed("pgqueue peek stock ", 3) == ["desk"]
    context: Any = type("Context", (), {"params": {"url": None}})
    assert completion.streams(context, "s") == ["s", "stock"]
    monkeypatch.setenv("PGQUEUE_URL", "host=127.0.0.1 port=1")
    assert completed("pgqueue send st", 2) == []
    monkeypatch.delenv("PGQUEUE_URL")
    assert completion.streams(context, "") == []


def test_peek_shows_what_is_next_and_takes_nothing(run: Run, queue: Client) -> None:
    queue.send_batch("s", ["one\t1", "two"], keys=["k", None])
    assert run("peek s c --max 1") == "1\tnew\tk\tone\\t1\n"
    assert run("peek s c") == run("peek s c")
    assert run("peek s --seq 2") == "2\t\ttwo\n"
    assert json.loads(run("peek s --json --max 1"))["data"] == "one\t1"
    assert json.loads(run("peek s c --json --max 1"))["state"] == "new"
    assert "omit CONSUMER" in run("peek s c --seq 2", code=2)
    assert "unknown consumer" in run("peek s no", code=1)
    assert queue.stats()[0].new == 2


def test_claims_are_listed_with_their_owner(run: Run, queue: Client) -> None:
    queue.send_batch("s", ["a", "b"])
    claim = queue.receive("s", "c", 2)
    assert claim is not None
    (listed,) = map(json.loads, run("claim list s c --json").splitlines())
    assert (listed["claim_id"], listed["remaining"]) == (claim.claim_id, 2)
    assert listed["owner"]
    shown = run("claim list")
    assert str(claim.claim_id) in shown
    assert " no " in shown, "whether it expired"
    assert "unknown consumer" in run("claim list s no", code=1)


@pytest.mark.promise("feature: purge")
def test_purge_asks_and_says_how_many(run: Run, queue: Client) -> None:
    queue.send_batch("s", ["a"] * 5)
    claim = queue.receive("s", "c", 2)
    assert claim is not None
    asked = run("purge s c", code=1, stdin="n\n")
    assert "forget 5 messages, 2 of them in 1 claims that end?" in asked
    assert queue.stats()[0].backlog == 3
    assert run("purge s c --yes") == "5 messages forgotten\n"
    assert (queue.stats()[0].backlog, claim.ack()) == (0, 0)
    assert "unknown consumer" in run("purge s no", code=1)


def test_describe_has_it_all(run: Run, queue: Client) -> None:
    run("stream create copy")
    run("stream bind s # copy")
    run("schedule create s n --cron @daily --data x")
    run("stream retention s --for 7d")
    run("consumer set s c max_deliver_count=3")
    queue.send("s", "x")
    shown = run("describe s")
    for part in ("kind: text", "keep for: 7 days", "Consumers", "Bindings", "Schedules", "copy"):
        assert part in shown
    found = json.loads(run("describe s --json"))
    assert found["stream"]["name"] == "s"
    assert [each["consumer"] for each in found["consumers"]] == ["c"]
    shown = run("describe s c")
    for part in ("max deliver count: 3", "next seq: 1", "backlog: 1", "paused: no", "status: "):
        assert part in shown
    assert json.loads(run("describe s c --json"))["position"]["next_seq"] == 1
    assert "unknown consumer" in run("describe s no", code=1)
    assert "unknown stream" in run("describe no", code=1)
