"""The commands that look: explain, stats --watch, top."""

import json
import re
from datetime import timedelta

import pytest

import spark_pgqueue
from tests.processes import started
from tests.sql import internals
from tests.unit.test_cli import EVIL, watched


@pytest.fixture
def queue(url, conn):
    """A stream "s" with the consumers "a", which is ahead, and "b", which has 5 messages."""
    with spark_pgqueue.connect(url) as queue:
        queue.create_stream("s")
        queue.create_consumer("s", "a")
        queue.create_consumer("s", "b")
        queue.send_batch("s", ["x"] * 5)
        ahead = queue.receive("s", "a", 4)
        assert ahead is not None
        ahead.ack()
        yield queue


def test_explain(queue, run):
    assert run("explain s b 5").startswith("new: published at ")
    queue.receive("s", "b", 2)
    shown = json.loads(run("explain s b 1 --json"))
    assert shown["state"] == "claimed"
    assert shown["until"]
    shown = run("explain s b 1")
    assert "held by spark-pgqueue" in shown
    assert "(until 20" in shown
    queue.receive("s", "b", 1).nack(delay=timedelta(hours=1), reason="no answer")
    state, failed, *_ = run("explain s b 3").splitlines()
    assert state.startswith("delayed: returned with a delay; delivered once")
    assert re.fullmatch(r"failed 20.* UTC  spark-pgqueue.*: no answer", failed), failed
    shown = json.loads(run("explain s b 3 --json"))
    assert [each["error"] for each in shown["failures"]] == ["no answer"]
    assert "unknown consumer" in run("explain s z 1", code=1)
    run("explain s b 0", code=2)


@pytest.mark.parametrize(("is_dead", "ways"), [(False, "now later never"), (True, "now never")])
def test_explain_of_a_message_that_has_failed_has_the_commands_for_it(queue, run, is_dead, ways):
    """They can be typed, and do what their word says."""
    for way in ways.split():
        claim = queue.receive("s", "b")
        seq = claim.messages[0].seq
        claim.dead_letter() if is_dead else claim.nack(delay=timedelta(hours=1))
        shown = run(f"explain s b {seq}").splitlines()[2 - is_dead :]
        commands = dict(line.split(maxsplit=1) for line in shown)
        assert " ".join(commands) == ways
        command = commands[way].removeprefix("pgqueue ").replace("TIME", "2099-01-01T00:00Z")
        run(f"{command} --yes" if "purge" in command else command)
        peeked = {each.seq: each.not_visible_until for each in queue.peek("s", "b")}
        if way == "never":
            assert seq not in peeked
        else:
            assert peeked[seq] is None or (peeked[seq].year == 2099) == (way == "later")
            queue.cancel("s", "b", [seq])


@pytest.mark.parametrize(
    "command", ["stats", "top --count 1", "consumer list", "consumer health", "describe s b"]
)
def test_the_health_of_a_consumer_is_the_same_word_in_each_command(queue, run, command):
    queue.receive("s", "b", 1).dead_letter(reason="no such customer")
    of_b = [line.split() for line in run(command).splitlines() if "a" not in line.split()]
    assert sum("failing" in words for words in of_b) == 1


def test_top_shows_those_first_that_have_most(queue, run):
    lines = run("top --count 2 --interval 0.1").splitlines()
    header, b, a, again, *_ = lines
    assert header.split()[:6] == ["stream", "consumer", "backlog", "sent/s", "settled/s", "empty"]
    assert (b.split()[:3], a.split()[:3]) == (["s", "b", "5"], ["s", "a", "1"])
    assert again == header
    assert lines[4].split()[:5] == ["s", "b", "5", "0", "0"], "the rates"
    assert run("top --count 1 --by claimed")
    assert max(map(len, lines)) <= 100


def test_an_estimate_is_shown_as_one(queue, conn, run):
    queue.create_group("s", "g", partitions=1)
    internals.publish_singly(conn, 1, 4000)
    shown = run("stats").splitlines()[1:]
    assert [line.split()[:3] for line in shown] == [
        ["s", "a", "~4,000"], ["s", "b", "~4,005"], ["s", "g", "~4,000"]
    ]  # fmt: skip
    top = run("top --count 1").splitlines()[1]
    assert top.split()[:3] == ["s", "b", "~4,005"]
    assert "backlog: ~4,005" in run("describe s b")
    assert "~4,000" in run("group list")
    assert "forget about 4005 messages?" in run("purge s b", code=1)
    assert [stats.estimated for stats in queue.stats()] == [True] * 3
    assert queue.health()[0].estimated
    assert queue.partitions("s", "g")[0].estimated


def test_stats_says_the_age_of_the_oldest(queue, run):
    header, _, b = run("stats").splitlines()
    assert header.split()[-2:] == ["oldest", "status"]
    assert b.split()[-2].endswith("s")


def test_watching_as_json_has_rates(queue, url):
    command = ["stats", "s", "--watch", "--json", "--interval", "0.1"]
    with started(*command, url=url) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert (first["consumer"], first["settled_per_second"]) == ("a", None)
        queue.receive("s", "b", 5).ack()
        while json.loads(watching.stdout.readline())["settled_per_second"] in (None, 0.0):
            assert watching.poll() is None


def test_top_in_a_terminal_ends_without_a_word(queue, url):
    """And obeys no name of a stream."""
    queue.create_stream(EVIL)
    queue.create_consumer(EVIL, EVIL)
    assert "\x9b" not in watched(url, "top")


def test_the_dashboard_is_printed_without_a_database(run):
    title = json.loads(run("metrics --grafana --url", "host=127.0.0.1 port=1"))["title"]
    assert title == "pgqueue"


def test_what_is_no_address_is_refused(run):
    for command in ("metrics", "web"):
        assert "is not HOST:PORT" in run(f"{command} --listen a:b", code=2)
