import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue.command_line import cli
from spark_pgqueue.command_line import input as command_input
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.printable import printable
from tests.conftest import user_of
from tests.processes import EACH, started

SECRET = "s3cr3t"


def redirected(url, redirection, *command_lines):
    """As a user runs them in a shell, with `<&-` or `>&-`: without an input or output."""
    words = [sys.executable, "-c", EACH, *command_lines]
    command = f"exec {shlex.join(words)} {redirection}"
    environment = {**os.environ, "PGQUEUE_URL": url}
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True)


def test_sql_prints_one_file_that_installs_the_same(empty_url, run):
    plain = run("sql")
    assert plain.startswith("-- ")
    assert "\nbegin isolation level" in plain
    assert "\nbegin isolation level" not in run("sql", "--no-transaction")
    with connection.connect(empty_url) as conn:
        conn.execute(plain.encode())
        schema.check(conn)


def test_settings_change_by_name_and_value(queue, run):
    run("consumer", "set", "s", "c", "max-deliver-count=5", "visibility_timeout=5 min")
    (consumer,) = queue.consumers("s")
    assert consumer.settings == {"max_deliver_count": 5, "visibility_timeout": "00:05:00"}
    assert "max_deliver_count=5" in run("consumer", "list")
    run("consumer", "set", "s", "c", "max_deliver_count=")
    run("consumer", "create", "s", "d", "max_deliver_count=2")
    assert [each.settings.get("max_deliver_count") for each in queue.consumers("s")] == [None, 2]
    run("stream", "set", "s", "notify=off", "max_bytes=10")
    assert queue.streams()[0].settings == {"notify": False, "max_bytes": 10}
    error = run("consumer", "set", "s", "c", "visibility_timout=1s", code=1)
    assert "no setting 'visibility_timout' hint: Did you mean visibility_timeout?" in error.replace(
        "\n", " "
    )
    assert "is not NAME=VALUE" in run("stream", "set", "s", "notify", code=2)


def test_history_and_outcomes(queue, run):
    run("consumer", "set", "s", "c", "keep_history=1 day")
    first, second = queue.send_batch("s", ["x", "y"])
    claim = queue.receive("s", "c", 2)
    run("ack", claim.claim_id, "--seq", first, "--result", '{"total": 12}')
    (line,) = run("outcome", "s", "c", first, "--json", "--wait", "1s").splitlines()
    assert json.loads(line)["result"] == {"total": 12}
    assert "claimed" in run("outcome", "s", "c", second)
    late = run("outcome", "s", "c", second, "--wait", "100ms", code=1)
    assert f"message {second} is not done: it is claimed" in late
    (line,) = run("history", "s", "c", "--json").splitlines()
    assert json.loads(line)["seqs"] == [[first, first]]
    shown = run("history", "s", "c", "--since", "2026-01-01")
    assert "total" in shown
    assert shown.splitlines()[1].startswith("1 "), "the number itself, not a pair"
    assert "JSON" in run("ack", claim.claim_id, "--result", "{", code=2)


def test_json_is_stored_as_it_is_typed(queue, conn, run):
    """Its numbers go through no float."""
    run("consumer", "set", "s", "c", "keep_history=1 day")
    refused = {"NaN": ("NaN is", 2), r'"\u0000"': ("NUL", 1), r'"\uD83D"': ("surrogate", 1)}
    refused[os.fsdecode(b'"\xff"')] = ("result is not Unicode text", 1)
    for text in (
        *("1.234567890123456789012345", "1e400", f"[{'9' * 5000}]"),
        r'["\\u0000", "\uD83D\uDE00"]',
    ):
        seq = queue.send("s", "x")
        claim = queue.receive("s", "c").claim_id
        for word, (says, code) in refused.items():
            assert says in run("ack", claim, "--result", word, code=code)
        run("ack", claim, "--result", text)
        stored = "select result = %s::jsonb from pgqueue.outcome('s', 'c', %s)"
        assert conn.execute(stored, [text, seq]).fetchone()[0], text
    queue.send("s", "x")
    run("defer", queue.receive("s", "c").claim_id, "--state", "1.234567890123456789012345")
    state = "select saved::text from pgqueue.receive('s', 'c')"
    assert conn.execute(state).fetchone() == ("1.234567890123456789012345",)


def test_schedules(queue, run):
    create = ("schedule", "create", "s", "nightly", "--data", "x", "--cron")
    at = run(*create, "0 3 * * *", "--time-zone", "Europe/Berlin", "--key", "k").strip()
    (schedule,) = queue.schedules("s")
    assert schedule.next_at == datetime.fromisoformat(at)
    assert (schedule.name, schedule.key, schedule.time_zone) == ("nightly", "k", "Europe/Berlin")
    assert run(*create, "@daily", code=1).endswith("\nhint: To change it, pass --replace.\n")
    run(*create, "@daily", "--replace")
    run("schedule", "create", "s", "often", "--data", "y", "--every", "90 s")
    run("schedule", "pause", "s", "often")
    assert [json.loads(line)["paused"] for line in run("schedule", "list", "--json").splitlines()]
    assert "nightly" in run("schedule", "list", "s")
    run("schedule", "resume", "s", "often")
    times = run("schedule", "times", "--every", "1 week", "--count", 2).splitlines()
    assert datetime.fromisoformat(times[1]) - datetime.fromisoformat(times[0]) == timedelta(days=7)
    assert "never matches" in run("schedule", "times", "--cron", "0 0 31 2 *", code=1)
    run("schedule", "drop", "s", "often", "--yes")
    run("schedule", "drop", "s", "often", "--if-exists")
    assert "unknown schedule" in run("schedule", "drop", "s", "often", code=1)
    assert [schedule.name for schedule in queue.schedules()] == ["nightly"]


def test_dead_letters_are_listed_shown_redriven_and_purged(queue, run):
    queue.send("s", "a\tb", key="k", headers={"h": 1})
    queue.send_batch("s", ["c", "d"])
    claim = queue.receive("s", "c", 3)
    queue.dead_letter(claim.claim_id, [1, 3], reason="no such user", details={"line": 7})
    queue.dead_letter(claim.claim_id, [2])
    assert "no such user" in run("dead", "list", "s", "c")
    listed = [json.loads(line) for line in run("dead", "list", "--json").splitlines()]
    assert [(row["reason"], row["messages"]) for row in listed] == [
        ("rejected", 1),
        ("no such user", 2),
    ]
    shown = run("dead", "show", "s", "c", "--seq", "1")
    assert shown == '1\tk\ta\\tb\tno such user\t\t1\t{"line": 7}\n'
    assert run("dead", "show", "s", "c", "--seq", "2") == "2\t\tc\trejected\t\t1\n"
    (shown,) = run("dead", "show", "s", "c", "--json", "--reason", "rejected").splitlines()
    assert json.loads(shown).items() >= {"seq": 2, "data": "c", "deliver_count": 1}.items()
    assert run("dead", "redrive", "s", "c", "--reason", "no such user", "--max", "1") == (
        "1 message to be redelivered\n"
    )
    assert [message.seq for message in queue.read_dead("s", "c")] == [2, 3]
    assert run("dead", "purge", "s", "c", "--seq", "2", "--yes") == "1 message deleted\n"
    assert [message.seq for message in queue.read_dead("s", "c")] == [3]


@pytest.mark.promise("concepts: transitions of a message")
def test_retry_ends_delays(queue, run):
    queue.send("s", "a")
    queue.receive("s", "c").nack(delay=timedelta(hours=1))
    assert run("retry", "s", "c") == "1 delay ended\n"
    claim = queue.receive("s", "c")
    run("consumer", "set", "s", "c", "backoff_base=1h")
    run("nack", str(claim.claim_id), "--delay", "0")
    assert queue.receive("s", "c").nack() == 1
    assert queue.receive("s", "c") is None


def test_receive_takes_what_passes_a_condition(queue, run):
    for key in "abab":
        queue.send("s", "x", key=key)
    condition = ["--where", '$.key == "b"']
    assert run("receive", "s", "c", "--max", "5", *condition) == "2\tb\tx\n4\tb\tx\n"
    assert run("receive", "s", "c", *condition, "--look", "1") == ""
    assert "where must be a jsonpath" in run("receive", "s", "c", "--where", "$.a >", code=1)


def test_postpone_delays_messages(queue, run):
    for data in "abc":
        queue.send("s", data)
    queue.receive("s", "c")
    until = ["--until", "2100-01-01"]
    assert run("postpone", "s", "c", "1", "2", *until) == "1 message postponed\n"
    assert json.loads(run("postpone", "s", "c", "2", *until, "--json"))["postponed"] == 1
    assert [m.seq for m in queue.receive("s", "c", 10).messages] == [3]
    run("postpone", "s", "c", "2", "--until", "2000-01-01T00:00:00Z")
    assert [m.seq for m in queue.receive("s", "c", 10).messages] == [2]
    run("postpone", "s", "c", "2", code=2)
    run("postpone", "s", "c", *until, code=2)
    run("postpone", "s", "c", "2", "--until", "soon", code=2)


def test_cancel_takes_messages_away(queue, run):
    for data in "abc":
        queue.send("s", data)
    claim = queue.receive("s", "c")
    assert run("cancel", "s", "c", "1", "3") == "2 messages cancelled\n"
    assert json.loads(run("cancel", "s", "c", "3", "--json"))["cancelled"] == 0
    assert claim.extend() == 0
    assert [m.seq for m in queue.receive("s", "c", 10).messages] == [2]
    run("cancel", "s", "c", code=2)


def test_a_message_is_sent_once_per_dedup_key(queue, run):
    error = run("send", "s", "--data", "a", "--dedup-key", "k", code=1)
    assert (
        "hint: Set how long to store dedup keys: pgqueue stream set 's' dedup_window='1 day'"
        in error
    )
    run("stream", "set", "s", "dedup_window=1 day")
    assert len({run("send", "s", "--data", "a", "--dedup-key", "k") for _ in range(2)}) == 1


def test_a_table_is_captured_listed_and_released(url, queue, run):
    with connection.connect(url) as conn:
        conn.execute("create table t (id int primary key, name text)")
    run("capture", "t", "s", "--key", "name", "--column", "id", "--old")
    (listed,) = map(json.loads, run("capture", "--json").splitlines())
    assert (listed["table"], listed["stream"], listed["outbox"]) == ("public.t", "s", False)
    assert listed["options"] == "key: name; columns: id; old rows: yes"
    with connection.connect(url) as conn:
        conn.execute("insert into t values (1, 'a')")
    message = json.loads(run("receive", "s", "c", "--json"))
    assert (message["key"], json.loads(message["data"])) == ("a", {"old": None, "new": {"id": 1}})
    assert "p_table" not in run("capture", "pg_class", "s", code=1)
    assert 'relation "no" does not exist' in run("capture", "no", "s", code=1)
    run("capture", "t", code=2)
    run("release", "t", "s")
    assert run("capture", "--json") == ""
    assert "captured to stream" in run("release", "t", "s", code=1)


def test_uninstall_says_what_goes_and_asks(url, queue, run):
    queue.send("s", "x")
    result = CliRunner().invoke(cli.app, ["uninstall"], input="n\n")
    assert result.exit_code == 1
    assert "1 stream ('s'), 1 consumer, and all messages" in result.output
    assert len(queue.streams()) == 1
    with connection.connect(url) as conn:
        conn.execute("create view mine as select * from pgqueue.stream_stats")
        told = run("uninstall", "--yes", code=1)
        assert "other objects depend on the schema pgqueue: view public.mine" in told
        assert "hint: Drop them first" in told
        conn.execute("drop view mine")
    assert "1 stream ('s')" in run("uninstall", "-y")
    with connection.connect(url) as conn:
        assert schema.installed_version(conn) is None
    result = CliRunner().invoke(cli.app, ["uninstall"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no schema" in result.stderr


def test_grant_lets_a_role_do_what_it_says(queue, run, new_role):
    assert "does not exist" in run("grant producer pgqueue_test_nobody", code=1)
    role = user_of(mine := new_role())
    assert "permission denied" in run("send s --url", mine, code=1, stdin=b"x")
    assert run("grant producer", role) == f"granted producer to {role}\n"
    run("send s --url", mine, stdin=b"x")
    assert "permission denied" in run("receive s c --url", mine, code=1)
    assert "permission denied" in run("stats --url", mine, code=1)
    run("grant observer", role)
    assert "s" in run("stats s --url", mine)
    run("grant everything", role, code=2)


def words_of(told: str) -> str:
    """The words in the box that an error about the command line comes in."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", told).split())


def test_install(empty_url, run):
    assert "not installed" in run("stats", "--url", empty_url, code=1)
    for _ in range(2):
        assert f"version {schema.expected_version()}" in run("install", "--url", empty_url)
    assert run("stats", "--url", empty_url, "--json") == ""


def test_version_and_help(run, monkeypatch):
    """A short name everywhere; it says where a password is safe, and shows none."""
    assert run("--version") == f"pgqueue {spark_pgqueue.__version__}\n"
    assert "receive" in run("--help")
    for word in ("PGQUEUE_URL", "PGPASSFILE", "service"):
        assert word in run("--help")
    monkeypatch.setenv("PGQUEUE_URL", f"postgresql://u:{SECRET}@h/d")
    for command in ("install", "stream create", "consumer create", "send", "receive", "ack"):
        shown = run(command, "--help")
        assert shown == run(command, "-h")
        assert "PGQUEUE_URL" in shown
        assert "A password in it shows in `ps`" in words_of(shown)
        assert SECRET not in shown


def test_streams_and_consumers(run, queue):
    run("stream", "create", "j", "--kind", "json", "--if-not-exists")
    run("stream", "create", "j", "--kind", "json", "--if-not-exists")
    assert "already exists" in run("stream", "create", "j", code=1)
    run("consumer", "create", "j", "k", "max_deliver_count=3", "--ordering", "key",
        "visibility_timeout=1m 30s", "--start", "2026-01-31")  # fmt: skip
    assert [line.split()[0] for line in run("stream", "list").splitlines()] == ["name", "j", "s"]
    rows = [json.loads(line) for line in run("consumer", "list", "--json").splitlines()]
    assert [(r["stream"], r["name"]) for r in rows] == [("j", "k"), ("s", "c")]
    assert rows[0]["visibility_timeout"] == 90.0
    assert "key" in run("consumer", "list", "j")
    run("consumer", "drop", "j", "k", stdin=b"y\n")
    run("stream", "drop", "j", "--yes")
    assert [s.name for s in queue.streams()] == ["s"]


def test_dropping_asks(run, queue):
    for arguments in (("stream", "drop", "s"), ("consumer", "drop", "s", "c")):
        for answer in ("n\n", ""):
            done = CliRunner().invoke(cli.app, arguments, input=answer)
            assert done.exit_code == 1
            assert "Delete" in done.stderr
    for arguments in (("stream", "drop", "x"), ("consumer", "drop", "s", "x")):
        said = run(*arguments, code=1)
        assert said.startswith("pgqueue: unknown ")  # and no question about it
        assert run(*arguments, "--if-exists") == ""
    assert run("consumer", "drop", "x", "x", "--if-exists") == ""
    assert len(queue.consumers("s")) == 1
    run("consumer", "drop", "s", "c", "--if-exists", "--yes")
    run("stream", "drop", "s", "--if-exists", "--yes")
    assert queue.streams() == []


def test_send_and_receive(run, queue):
    seq = run("send", "s", "--data", "hä\n", "--key", "k", "--header", "a=b=c", "--header", "d=")
    assert seq == "1\n"
    run("send", "s", "--data", "first", "--priority", 5)
    assert run("send", "s", stdin=b"of\nstdin\n") == "3\n"
    assert run("receive", "s", "c") == "2\t\tfirst\n"
    lines = run("receive", "s", "c", "--max", 9, "--json").splitlines()
    one, two = map(json.loads, lines)
    assert (one["data"], one["key"], one["headers"]) == ("hä\n", "k", {"a": "b=c", "d": ""})
    assert two["data"] == "of\nstdin\n"
    assert datetime.fromisoformat(one["inserted_at"]).tzinfo
    assert queue.stats()[0].claimed == 0
    assert run("receive", "s", "c") == ""
    queue.send("s", "later", deliver_at=datetime.now(UTC) + timedelta(seconds=0.5))
    assert run("receive", "s", "c", "--wait", "20s").endswith("\tlater\n")
    run("send", "s", "--data", "much later", "--delay", "1h")
    run("send", "s", "--lines", "--delay", "60 minutes", stdin=b"a\nb\n")
    due = [queue.outcome("s", "c", seq).due_at - datetime.now(UTC) for seq in (5, 6, 7)]
    assert all(timedelta(minutes=59) < each < timedelta(minutes=61) for each in due)


def test_send_creates_a_stream_where_it_is_told_to(run, queue):
    """With the messages, or not at all; and leaves one alone that there is."""
    assert "unknown stream" in run("send", "new", "--data", "x", code=1)
    assert "UTF-8" in run("send", "new", "--create", "--lines", stdin=b"a\n\xff\n", code=1)
    assert "unknown stream" in run("send", "new", "--data", "x", code=1)
    assert run("send", "new", "--create", "--lines", stdin=b"a\nb\n") == "2 messages sent\n"
    assert run("send", "new", "--create", "--data", "c") == "3\n"
    assert queue.kind("new") == "text"
    run("stream", "create", "bytes", "--kind", "binary")
    assert "with kind binary" in run("send", "bytes", "--create", stdin=b"\xff", code=1)
    assert "name" in run("send", "", "--create", "--data", "x", code=1)


def test_send_lines(run, queue, monkeypatch):
    monkeypatch.setattr(command_input, "BATCH", 2)
    sent = run("send", "s", "--lines", "--key", "k", "--header", "a=b", stdin=b"1\n\n3\r\n4\n5")
    assert sent == "5 messages sent\n"
    messages = queue.receive("s", "c", 9).messages
    assert [m.data for m in messages] == ["1", "", "3\r", "4", "5"]
    assert {(m.key, m.headers["a"]) for m in messages} == {("k", "b")}
    assert run("send", "s", "--lines") == "0 messages sent\n"
    run("stream", "create", "j", "--kind", "json")
    run("consumer", "create", "j", "c")
    assert "not valid JSON" in run("send", "j", "--lines", code=1, stdin=b"1\n2\n3\n4\n{")
    assert queue.receive("j", "c", 9) is None


def test_a_consumer_is_moved_replayed_and_paused(run, queue, url):
    queue.send_batch("s", ["one", "two"])
    assert run("consumer", "seek", "s", "c", "latest") == "2 messages forgotten\n"
    assert run("receive", "s", "c") == ""
    assert (
        run("consumer", "replay", "s", "c", "earliest", "seq 2") == "1 message to be redelivered\n"
    )
    run("consumer", "pause", "s", "c")
    assert run("receive", "s", "c") == ""
    run("consumer", "resume", "s", "c")
    assert run("receive", "s", "c") == "1\t\tone\n"
    run("consumer", "create", "s", "d", "--start", "seq 2")
    assert run("receive", "s", "d") == "2\t\ttwo\n"
    here = json.loads(spark_pgqueue.offsets(url, "s"))["s"]
    queue.send("s", "three")
    run("consumer", "create", "s", "e", "--start", json.dumps(here))
    assert run("receive", "s", "e") == "3\t\tthree\n"
    assert run("consumer", "seek", "s", "c", json.dumps(here)) == "0 messages forgotten\n"
    queue.seek("s", "d", here)
    assert run("receive", "s", "d") == "3\t\tthree\n"
    assert "and not earliest" in run("consumer", "seek", "s", "c", "soon", code=2)
    assert "the next one, not 'seq 9'" in run("consumer", "seek", "s", "c", "seq 9", code=1)


def test_a_consumer_has_a_filter_and_a_stream_is_copied(run, queue):
    run("consumer", "create", "s", "eu", "--topic", "*.eu", "--where", '$.data == "1"')
    run("stream", "create", "copy")
    run("consumer", "create", "copy", "c")
    run("stream", "bind", "s", "#.eu", "copy")
    run("send", "s", "--key", "a.eu", "--data", "1")
    run("send", "s", "--key", "b.eu", "--data", "2")
    assert run("receive", "s", "eu", "--max", "9") == "1\ta.eu\t1\n"
    assert [(c.topic, c.where) for c in queue.consumers("s")] == [
        (None, None),
        ("*.eu", '($."data" == "1")'),
    ]
    assert run("receive", "copy", "c", "--max", "9") == "1\ta.eu\t1\n2\tb.eu\t2\n"
    assert json.loads(run("stream", "bindings", "--json"))["topic"] == "#.eu"
    run("stream", "unbind", "s", "#.eu", "copy")
    assert "is not bound" in run("stream", "unbind", "s", "#.eu", "copy", code=1)
    assert "a jsonpath" in run("consumer", "create", "s", "x", "--where", "$.", code=1)


def test_binary(run, queue):
    run("stream", "create", "b", "--kind", "binary")
    run("consumer", "create", "b", "c")
    run("send", "b", stdin=b"\xff\x00\n")
    run("send", "b", "--data", "ä")
    assert run("receive", "b", "c") == "1\t\t\\xff000a\n"
    assert json.loads(run("receive", "b", "c", "--json"))["data"] == "w6Q="  # base64
    assert "not UTF-8" in run("send", "s", code=1, stdin=b"\xff")


def test_time_and_consumers(run, queue):
    queue.create_consumer("s", "d")
    later = datetime.now(UTC) + timedelta(hours=1)
    run("send", "s", "--data", "x", "--deliver-at", later.isoformat(), "--consumer", "d")
    run("receive", "s", "d")
    assert [(s.consumer, s.delayed) for s in queue.stats()] == [("c", 0), ("d", 1)]
    assert "unknown consumer 'e'" in run("send", "s", "--data", "x", "--consumer", "e", code=1)


EVIL = "\x1b[31m\ta\nü\u202e\x9b2J\x7f"
ESCAPED = r"\x1b[31m\ta\nü\u202e\x9b2J\x7f"


def obeyed(shown: str) -> set[str]:
    """The characters in it that a terminal would obey, but for the ends of lines."""
    return {each for each in shown if each != "\n" and printable(each) != each}


def test_a_message_does_not_command_the_terminal(run, queue):
    run("send", "s", "--data", EVIL, "--key", "\x07")
    assert run("receive", "s", "c") == f"1\t\\x07\t{ESCAPED}\n"


@pytest.fixture
def evil(queue):
    """A stream and a consumer of this name, and a message: others choose what is in terminals."""
    queue.create_stream(EVIL)
    queue.create_consumer(EVIL, EVIL)
    queue.send(EVIL, EVIL, key=EVIL, headers={EVIL: EVIL})


@pytest.mark.usefixtures("evil")
def test_names_do_not_command_the_terminal(run):
    for arguments in (
        ("stream list",), ("consumer list",), ("stats",), ("top --count 1",),
        ("explain", EVIL, EVIL, 1),
    ):  # fmt: skip
        shown = run(*arguments)
        assert shown
        assert obeyed(shown) == set(), arguments
        # long names go on in the next line
        assert arguments[0] == "explain" or ESCAPED in re.sub(r"\s", "", shown)
    for arguments in (("stream", "drop", EVIL), ("consumer", "drop", EVIL, EVIL)):
        done = CliRunner().invoke(cli.app, arguments, input="n\n")
        assert "Delete" in done.stderr
        assert obeyed(done.output) == set(), arguments


REFUSE = r"""
create function pgqueue.refuse() returns trigger language plpgsql
as $$ begin raise exception E'no\x1b[31m' using hint = E'ask\x1b[31m'; end $$;
create trigger refuse before insert on pgqueue.streams execute function pgqueue.refuse()
"""


def test_errors_do_not_command_the_terminal(run, queue, url):
    assert obeyed(run("stats", EVIL, code=1)) == set()
    assert obeyed(run("ack", EVIL, code=2)) == set()
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(REFUSE)
    said = run("stream", "create", "x", code=1)
    assert said == "pgqueue: no\\x1b[31m\nhint: ask\\x1b[31m\n"


@pytest.mark.usefixtures("evil")
def test_json_is_exact_and_does_not_command_the_terminal_either(run):
    for arguments in (
        ("stream", "list"), ("consumer", "list"), ("stats",), ("receive", EVIL, EVIL)
    ):  # fmt: skip
        shown = run(*arguments, "--json")
        assert obeyed(shown) == set(), arguments
        rows = [json.loads(line) for line in shown.splitlines()]
        assert EVIL in {row.get("consumer", row.get("name", row.get("data"))) for row in rows}
    assert (rows[0]["key"], rows[0]["headers"]) == (EVIL, {EVIL: EVIL})


def test_a_claim_is_kept_and_settled_by_number(run, queue):
    queue.send_batch("s", ["1", "2", "3", "4"])
    result = CliRunner().invoke(cli.app, ["receive", "s", "c", "--max", "4", "--no-ack"])
    claim = queue._value("select claim_id from pgqueue.open_claims")
    assert f"pgqueue ack {claim}" in result.stderr
    assert run("ack", claim, "--seq", 1, "--seq", 2) == "2 messages acknowledged\n"
    nacked = run("nack", claim, "--seq", 3, "--delay", "1h", "--reason", "why not")
    assert nacked == "1 message returned\n"
    assert queue._value("select last_error from pgqueue.message_states where seq = 3") == "why not"
    assert "no message acknowledged" in run("ack", claim, "--seq", 1, code=1)
    run("nack", claim, "--delay", "0")
    assert "no message returned" in run("nack", claim, code=1)
    options = ("--json", "--no-ack", "--visibility-timeout", "2h")
    received = json.loads(run("receive", "s", "c", *options))
    assert (received["seq"], received["deliver_count"]) == (4, 2)
    assert run("ack", received["claim_id"]) == "1 message acknowledged\n"


def test_stats(run, queue):
    queue.send_batch("s", ["x"] * 1234)
    header, row = run("stats").splitlines()
    assert dict(zip(header.split(), row.split(), strict=True))["backlog"] == "1,234"
    assert json.loads(run("stats", "s", "--json"))["new"] == 1234
    assert max(map(len, (header, row))) <= 100
    assert run("maintain", "--staged-age", "2 days").startswith("staged chunks: 0 deleted")


def test_retention(run, queue):
    shown = run("stream", "retention", "s", "--for", "7d", "--bytes", "10 GB", "--unread", "drop")
    assert "keep for: 7 days\n" in shown
    assert "keep bytes: 10,737,418,240" in shown
    assert "advice: maintain() has not run yet" in shown
    assert "unread: drop" in run("stream", "retention", "s"), "showing it changed it"
    assert json.loads(run("stream", "retention", "s", "--json"))["keep_bytes"] == 10 << 30
    assert "keep for: 1 day 12:00:00\n" in run("stream", "retention", "s", "--for", "36h")
    wrong = run("stream", "retention", "s", "--unread", "keep", code=1)
    assert "--unread needs a limit" in wrong
    assert "keep for" not in run("stream", "retention", "s", "--forever")
    queue.create_consumer("s", "idle", start="earliest", if_not_exists=True)
    queue.set_retention("s", messages=1)
    for _ in range(4):
        queue.send_batch("s", ["x"] * 10)
        queue.maintain()
    held = ", ".join(queue.retention("s")[0].held_by)
    assert "consumer idle" in held
    assert f"held by: {held}" in run("stream", "retention", "s")


def test_maintaining_goes_on_until_it_is_ended_or_may_not(queue, url, new_role):
    queue.set_retention("s", done=True)
    command = "maintain", "--every", "50ms"
    with started(*command, url=url) as process, started(*command, url=new_role()) as other:
        while queue.retention("s")[0].maintained_at is None:
            assert process.poll() is None
        process.terminate()
        process.communicate(timeout=10)
        assert other.communicate(timeout=60)[1].count("permission denied") == 1
        assert other.returncode == 1


def watched(url, *command):
    """What a command shows on a terminal that goes on, until Ctrl-C."""
    ours, theirs = pty.openpty()
    with started(*command, "--interval", "0.2", url=url, stdout=theirs) as watching:
        os.close(theirs)
        shown = b""
        while shown.count(b"backlog") < 3:
            shown += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 130
        assert watching.stderr is not None
        assert watching.stderr.read() == ""
    os.close(ours)
    return shown.decode(errors="replace")


def test_closed_input_is_an_error_that_says_so(queue, url):
    done = redirected(url, "<&-", "send s", "send s --lines", "stream drop s")
    assert done.stdout == ""
    nothing = "pgqueue: standard input is closed, so there is nothing to send"
    nobody = "pgqueue: cannot ask for confirmation: standard input is closed"
    assert done.stderr.splitlines() == [
        *(nothing, "hint: pass --data", "ended with 1") * 2,
        *(nobody, "hint: pass --yes", "ended with 1"),
    ]
    assert [s.new for s in queue.stats()] == [0]


def test_output_that_is_closed_or_full_is_an_error_and_nothing_is_acknowledged(queue, url):
    queue.send("s", "x")
    commands = "receive s c", "receive s c --json", "stats", "stats --watch", "stream list"
    said = redirected(url, ">&-", *commands).stderr.splitlines()
    hint = "hint: to discard the output, use > /dev/null"
    assert said == ["pgqueue: standard output is closed", hint, "ended with 1"] * len(commands)
    if Path("/dev/full").exists():
        done = redirected(url, ">/dev/full", "receive s c")
        assert "ended with 0" not in done.stderr
        assert "Traceback" not in done.stderr
    assert queue.receive("s", "c").messages[0].deliver_count == 1  # as nobody saw it


def test_output_that_is_not_utf8_takes_every_message(queue, url, monkeypatch):
    """As in a container without a locale: what it cannot show is escaped, --json stays exact."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    queue.send_batch("s", ["hä 你", "hä 你"])
    queue.create_stream("ä")
    done = redirected(url, "", "receive s c", "receive s c --json", "stream list", "ack 999")
    assert "claim 999 is not live" in done.stderr
    received, exact, *listed = done.stdout.splitlines()
    assert received == "1\t\th\\xe4 \\u4f60"
    assert json.loads(exact)["data"] == "hä 你"
    assert any(line.startswith("\\xe4 ") for line in listed)


def test_no_input_is_no_message(run, queue):
    said = "pgqueue: standard input is empty\nhint: for an empty message, give --data ''\n"
    assert run("send", "s", code=1) == said
    assert run("send", "s", "--data", "") == "1\n"


def test_the_shell_completes_commands_and_options():
    pgqueue = Path(sys.executable).with_name("pgqueue")
    shown = subprocess.run(
        ["bash", "-c", f"{shlex.quote(str(pgqueue))} --show-completion; true"],
        capture_output=True,
        text=True,
    )
    assert "complete " in shown.stdout, shown.stderr
    assert "pgqueue" in shown.stdout
    for words, number, expected in (
        ("pgqueue str", 1, "stream"),
        ("pgqueue send --pr", 2, "--priority"),
    ):
        assert completed(words, number) == [expected]


def completed(words, number, shell="bash"):
    """What a Tab behind these words shows; the words are numbered from 0."""
    given = {
        "_PGQUEUE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(number),
        "_TYPER_COMPLETE_ARGS": words,
    }
    done = CliRunner().invoke(cli.app, [], prog_name="pgqueue", env=given)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


ERRORS = [
    ("send nope --data x", "unknown stream 'nope'"),
    ("send s --data x --priority 99999", "priority must be from -32768 to 32767"),
    ("receive s nope", "unknown consumer 'nope' of stream 's'"),
    ("stats nope", "unknown stream 'nope'"),
    ("consumer list nope", "unknown stream 'nope'"),
    ("consumer create s c", "already exists"),
    ("consumer create s x max_deliver_count=0", "at least 1, or never, not"),
    ("consumer drop s nope --yes", "unknown consumer 'nope'"),
    ("stats --url host=127.0.0.1\0port=1", "refused"),
]


def test_hints_are_commands_of_this_program(run, queue):
    assert "pgqueue stream create 'no pe'" in run("send", "no pe", "--data", "x", code=1)
    assert "pgqueue consumer create 's' 'nope'" in run("receive", "s", "nope", code=1)
    for words, instead in (
        ("stream create s", "; to change its settings, use pgqueue stream set."),
        ("consumer create s c", "; to change its settings, use pgqueue consumer set."),
        ("group create s g", "."),
    ):
        run(words, "--if-not-exists")
        hint = run(words, code=1).splitlines()[1]
        assert hint == f"hint: Pass --if-not-exists to use it as it is{instead}"
    assert "leave --consumer away" in run("send", "s", "--data", "x", "--consumer", "e", code=1)


def test_the_payload_as_an_argument_is_told_its_option(run, queue):
    told = words_of(run("send", "s", "hello", code=2))
    assert "(hello): give the payload with --data" in told
    assert "--data" not in words_of(run("stats", "s", "hello", code=2))


def test_an_empty_list_says_so(run):
    for arguments in (("stream", "list"), ("consumer", "list"), ("stats",)):
        done = CliRunner().invoke(cli.app, arguments)
        assert (done.stdout, done.stderr) == ("", "Nothing to show.\n")
        assert run(*arguments, "--json") == ""


def test_stats_name_the_streams_that_no_consumer_gets(run, queue):
    for name in ("alone", "bare"):
        queue.create_stream(name)
    queue.send("alone", "x")
    queue.send("s", "x")
    for arguments in (["stats"], ["stats", "alone"]):
        done = CliRunner().invoke(cli.app, arguments)
        (shown,) = [line for line in done.stderr.splitlines() if line != "Nothing to show."]
        assert shown == "No consumer receives the messages of alone: see pgqueue doctor."
    shown = CliRunner().invoke(cli.app, ["doctor"]).output
    assert "no consumer receives its messages: see pgqueue consumer create; if read" in words_of(
        shown
    )
    assert "No consumer" not in CliRunner().invoke(cli.app, ["stats", "s"]).output


def test_errors_are_one_line_and_a_hint(run, queue, url):
    began = time.monotonic()
    for arguments, message in ERRORS:
        words = [word.replace("\0", " ") for word in arguments.split()]
        first, *rest = run(words[0], *words[1:], code=1).splitlines()
        assert first.startswith("pgqueue: ")
        assert message in first
        assert len(rest) <= 1
        assert all(line.startswith("hint: ") for line in rest)
    assert time.monotonic() - began < 10, "a server that is away is reported at once"
    with psycopg.connect(url) as holder:
        holder.execute("lock pgqueue.streams")
        slow = connection.conninfo(url) + " options='-c lock_timeout=100'"
        (line,) = run("stream", "list", "--url", slow, code=1).splitlines()
        assert "lock timeout" in line


NONSENSE = [
    "stream create x --kind xml | for '--kind': 'xml' is not one of 'text', 'json', 'binary'.",
    "consumer create s x --ordering fifo",
    "consumer create s x --start yesterday | and not earliest, latest, 'seq N' or an OFFSET",
    "consumer create s x max_deliver_count",
    "consumer create s x --set max_deliver_count=3",
    "send s --data x --lines",
    "send s --data x --priority high",
    "send s --data x --deliver-at tomorrow",
    "send s --data x --delay 5 | '5' is not 0, nor a duration with a unit",
    "send s --data x --delay 5s --deliver-at 2030-01-31 | give --delay or --deliver-at",
    "send s --data x --header novalue",
    "receive s c --max 0",
    "receive s c --visibility-timeout 0s",
    "ack abc",
    "ack 0",
    "nack 1 --seq x",
    "nack 1 --delay -1s",
    "nack 1 --delay 5 | '5' is not 0, nor a duration with a unit: 500ms, 30s or '5 minutes'",
    "work a:b s c --wait 5 | '5' is not 0, nor a duration with a unit",
    "work a:b s c --timeout 0 | '0' is not a duration longer than 0 with a unit: 500ms, 30s or",
    "work a:b s c --concurrency zero | Invalid value for '--concurrency': 'zero'",
    "work a:b s c --concurrency 0",
    "ack 1 --seq one | Invalid value for '--seq': 'one'",
    "stats --watch --interval 0",
    "maintain --staged-age day",
    "nonsense",
    "send",
]


def test_a_command_line_that_makes_no_sense_is_refused(run, queue):
    for line in NONSENSE:
        arguments, _, said = line.partition(" | ")
        assert said in words_of(run(arguments, code=2))
    assert queue.receive("s", "c") is None


# "\\ " is a space within an argument.
WITH_A_PASSWORD = [
    f"stats --url postgresql://u:{SECRET}@127.0.0.1:1/d",
    f"stats --url postgresql://u:a@{SECRET}@127.0.0.1:1/d",
    f"stats --url host=127.0.0.1\\ port=1\\ password={SECRET}",
    f"stats postgresql://u:{SECRET}@h/d",
    f"install postgresql://u:{SECRET}@h/d",
    f"--url postgresql://u:{SECRET}@h/d stats",
    f"postgresql://u:{SECRET}@h/d",
    f"send s --data x --urk postgresql://u:{SECRET}@h/d",
    f"ack postgresql://u:{SECRET}@h/d",
    f"receive s c --max postgresql://u:{SECRET}@h/d",
    f"doctor --url postgresql://u:{SECRET}@127.0.0.1:1/d",
    f"stream drop s --if-exists --url postgresql://u:{SECRET}@127.0.0.1:1/d",
]


def test_no_password_is_shown(queue):
    for arguments in WITH_A_PASSWORD:
        split = [a.replace("\0", " ") for a in arguments.replace("\\ ", "\0").split()]
        done = CliRunner().invoke(cli.app, split)
        assert done.exit_code in (1, 2)
        assert SECRET not in done.output
        assert isinstance(done.exception, SystemExit), "a traceback"
