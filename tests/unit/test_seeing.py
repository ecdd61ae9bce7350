"""The commands that look: explain, stats --watch, top."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from functools import partial

import pytest

import spark_pgqueue
from tests.unit.test_cli import EVIL, obeyed, process


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


def test_explain(queue, url):
    done = process("explain", "s", "b", "5", url=url)
    assert done.stdout.startswith("new: published at ")
    queue.receive("s", "b", 2)
    shown = json.loads(process("explain", "s", "b", "1", "--json", url=url).stdout)
    assert shown["state"] == "claimed"
    assert shown["until"]
    done = process("explain", "s", "b", "1", url=url)
    assert "held by spark-pgqueue" in done.stdout
    assert "(until 20" in done.stdout
    assert "unknown consumer" in process("explain", "s", "z", "1", url=url).stderr
    assert process("explain", "s", "b", "0", url=url).returncode == 2


def test_top_shows_those_first_that_have_most(queue, url):
    done = process("top", "--count", "2", "--interval", "0.1", url=url)
    header, b, a, again, *_ = done.stdout.splitlines()
    assert header.split()[:6] == ["stream", "consumer", "backlog", "sent/s", "settled/s", "empty"]
    assert (b.split()[:3], a.split()[:3]) == (["s", "b", "5"], ["s", "a", "1"])
    assert again == header
    assert done.stdout.splitlines()[4].split()[:5] == ["s", "b", "5", "0", "0"], "the rates"
    by_settled = process("top", "--count", "1", "--by", "claimed", url=url)
    assert by_settled.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_stats_says_the_age_of_the_oldest(queue, url):
    header, _, b = process("stats", url=url).stdout.splitlines()
    assert header.split()[-1] == "oldest"
    assert b.split()[-1].endswith("s")


def test_watching_as_json_has_rates(queue, url):
    command = ["stats", "s", "--watch", "--json", "--interval", "0.1", "--url", url]
    with subprocess.Popen(
        [sys.executable, "-m", "spark_pgqueue", *command], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert (first["consumer"], first["settled_per_second"]) == ("a", None)
        queue.receive("s", "b", 5).ack()
        while json.loads(watching.stdout.readline())["settled_per_second"] in (None, 0.0):
            assert watching.poll() is None
        watching.terminate()


def test_top_in_a_terminal_ends_without_a_word(queue, url):
    """And obeys no name of a stream."""
    queue.create_stream(EVIL)
    queue.create_consumer(EVIL, EVIL)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "spark_pgqueue", "top", "--interval", "0.2", "--url", url]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=theirs, stderr=pipe, preexec_fn=listen) as watching:
        os.close(theirs)
        shown = b""
        while shown.count(b"backlog") < 3:
            shown += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 130
        assert watching.stderr is not None
        assert watching.stderr.read() == b""
    os.close(ours)
    assert "\x9b" not in shown.decode(errors="replace")


def test_names_do_not_command_the_terminal(queue, url):
    queue.create_stream(EVIL)
    queue.create_consumer(EVIL, EVIL)
    for command in (("top", "--count", "1"), ("stats",), ("explain", EVIL, EVIL, "1")):
        assert obeyed(process(*command, url=url).stdout) == set(), command


def test_the_dashboard_is_printed_without_a_database(url):
    done = process("metrics", "--grafana", url="host=127.0.0.1 port=1")
    assert json.loads(done.stdout)["title"] == "pgqueue"


@pytest.mark.parametrize("command", ["metrics", "web"])
def test_what_is_no_address_is_refused(command, url):
    done = process(command, "--listen", "a:b", url=url)
    assert done.returncode == 2
    assert "is not HOST:PORT" in done.stderr
