"""What the worker logs of errors: all of it, without passwords, and of a bounded length."""

import ast
import asyncio
import logging
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue import Consumer, Reject, Retry
from spark_pgqueue.command_line import cli
from spark_pgqueue.worker import failure_log
from spark_pgqueue.worker.verdicts import of_error, trace
from tests.processes import wait_until
from tests.unit.test_worker import each_way, either

MOMENT = timedelta(milliseconds=50)
CONSUMER = {"settings": {"max_deliver_count": 1}}
URL = "postgresql://me:s3cret@host/db"
ROOT = Path(spark_pgqueue.__file__).parent


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _of(text: str) -> Exception:
    return ConnectionError(text)


def _caused(text: str) -> Exception:
    error = ValueError("the last one")
    error.__cause__ = KeyError(text)
    return error


def _within(text: str) -> Exception:
    error = ValueError("the last one")
    error.__context__ = OSError("in between")
    error.__context__.__context__ = KeyError(text)
    return error


def _noted(text: str) -> Exception:
    error = ValueError("the last one")
    error.add_note(text)
    return error


def _grouped(text: str) -> Exception:
    return ExceptionGroup("the group", [ValueError(text), ExceptionGroup(text, [_caused(text)])])


def _of_syntax(text: str) -> Exception:
    return SyntaxError("bad", (text, 1, 1, text))


ERRORS: list[Callable[[str], Exception]] = [_of, _caused, _within, _noted, _grouped, _of_syntax]


@each_way
def test_no_password_of_an_error_is_logged(
    queue: Any, url: str, caplog: pytest.LogCaptureFixture, awaited: bool
) -> None:
    async def handle(message: Any) -> None:
        if message.data != "good":
            raise ERRORS[int(message.data)](f"no answer of {URL}")

    def hook(message: Any, result: Any) -> None:
        raise _caused(f"no answer of {URL}")

    queue.send_batch("s", [*map(str, range(len(ERRORS))), "good"])
    with caplog.at_level(logging.DEBUG):
        Consumer(url, "s", "c").run(
            either(awaited, handle), wait=MOMENT, on_success=hook, on_failure=hook
        )
    tracebacks = [r for r in caplog.records if "Traceback (most recent" in r.getMessage()]
    # a hook fails for each message, and a handler for each but the good one
    assert len(tracebacks) == 2 * len(ERRORS) + 1
    assert caplog.text.count("in handle\n") == len(ERRORS)
    assert caplog.text.count("me:***") >= len(tracebacks)
    assert "s3cret" not in caplog.text
    assert not any(record.exc_info for record in caplog.records)
    dead = queue.dead_letters("s", "c")
    assert sum(each.messages for each in dead) == len(ERRORS)
    assert "s3cret" not in str(dead)


def dead_lettered(caplog: pytest.LogCaptureFixture) -> list[str]:
    return sorted(
        said.removeprefix("'s', 'c': message ")
        for said in caplog.messages
        if "dead-lettered after" in said
    )


def test_each_dead_letter_has_a_line(
    queue: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(message: Any) -> None:
        raise ValueError("no")

    queue.alter_consumer("s", "c", {"max_deliver_count": 2, "backoff_base": "0 s"})
    queue.send_batch("s", ["x"] * 5)
    Consumer(url, "s", "c").run(handle, wait=timedelta(0))
    assert dead_lettered(caplog) == [
        f"{seq} dead-lettered after 2 deliveries" for seq in range(1, 6)
    ]


def test_a_dead_letter_has_its_line_while_the_worker_runs(
    queue: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(message: Any) -> None:
        if message.data == "bad":
            raise ValueError("no")
        wait_until(lambda: dead_lettered(caplog), 10)

    queue.alter_consumer("s", "c", {"max_deliver_count": 1})
    queue.send_batch("s", ["bad", "good"])
    assert Consumer(url, "s", "c").run(handle, wait=timedelta(0), concurrency=2) == 1
    assert dead_lettered(caplog) == ["1 dead-lettered after 1 delivery"]


def test_each_dead_letter_of_a_batch_has_a_line(
    queue: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(messages: Any) -> None:
        kind = Reject if messages[0].seq == 1 else Retry
        raise kind("no", messages=messages[1:])

    queue.send_batch("s", ["x"] * 6)
    Consumer(url, "s", "c").run(handle, wait=timedelta(0), batch=3)
    assert dead_lettered(caplog) == [
        f"{seq} dead-lettered after 1 delivery" for seq in (2, 3, 5, 6)
    ]


def test_lines_about_failures_are_few_and_count_the_others(
    queue: Any, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(message: Any) -> None:
        raise Retry("no", delay=timedelta(hours=1))

    monkeypatch.setattr(failure_log, "MOST", 3)
    queue.alter_consumer("s", "c", {"max_deliver_count": 2})
    queue.send_batch("s", ["x"] * 20)
    Consumer(url, "s", "c").run(handle, wait=timedelta(0), concurrency=20)
    said = [each for each in caplog.messages if "to be retried" not in each]
    assert re.fullmatch("'s', 'c': message [0-9]+ will be redelivered at .*", said[0])
    counted = re.findall("([0-9]+) (?:other|more) messages? failed", "\n".join(said))
    firsts = sum("will be redelivered" in each for each in said)
    assert firsts + sum(map(int, counted)) == 20
    assert len(said) < 6


@pytest.mark.parametrize("way", ["thread", "task", "process"])
def test_a_call_that_is_timed_out_has_a_line(
    queue: Any, url: str, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    async def wait(message: Any) -> None:
        await asyncio.sleep(20)

    queue.send("s", "x")
    handle = wait if way == "task" else _sleep
    options: Any = {"processes": 1} if way == "process" else {}
    Consumer(url, "s", "c").run(
        handle, wait=timedelta(0), timeout=timedelta(seconds=0.2), grace=timedelta(0), **options
    )
    assert caplog.messages[0] == "'s', 'c': message 1 (delivery 1): timed out after 0:00:00.200000"
    assert dead_lettered(caplog) == ["1 dead-lettered after 1 delivery"]


@pytest.mark.parametrize("processes", [None, 1])
def test_the_cause_of_a_verdict_is_logged_and_stored(
    queue: Any, url: str, caplog: pytest.LogCaptureFixture, processes: int | None
) -> None:
    queue.send_batch("s", ["reject", "details", "list", "retry"])
    Consumer(url, "s", "c").run(_judge, wait=timedelta(0), processes=processes)
    dead = {each.seq: (each.reason, each.error, each.details) for each in queue.read_dead("s", "c")}
    cause = "ValueError: no number"
    assert dead == {
        1: ("bad input", None, {"error": cause}),
        2: ("bad input", None, {"order": 13, "error": cause}),
        3: ("bad input", None, [13]),
        4: ("max deliveries", cause, None),
    }
    if processes is None:  # the others log to standard error
        lines = [each for each in caplog.messages if "delivery 1" in each]
        for said in ["rejected: bad input"] * 3 + ["to be retried: " + cause]:
            line = lines.pop(0)
            assert said in line
            assert "Traceback (most recent" in line
            assert line.endswith(cause)


def _judge(message: Any) -> None:
    details = {"details": {"order": 13}, "list": [13]}.get(message.data)
    try:
        raise ValueError("no number")
    except ValueError as error:
        if message.data == "retry":
            raise Retry from error
        raise Reject("bad input", details=details) from error


def _sleep(message: Any) -> None:
    time.sleep(20)


def test_an_error_without_a_text_is_a_failure_as_any_other(queue: Any, url: str) -> None:
    def handle(message: Any) -> None:
        raise _Unspeakable

    queue.send("s", "x")
    Consumer(url, "s", "c").run(handle, wait=MOMENT)
    (dead,) = queue.dead_letters("s", "c")
    assert dead.error == "_Unspeakable: its text cannot be made: ValueError"


def test_a_hook_that_ends_the_command_shows_no_password(
    queue: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooked.py").write_text(
        "import spark_pgqueue\n"
        "def boom():\n"
        f"    raise ValueError('no answer of {URL}')\n"
        "@spark_pgqueue.handler('s', 'c', on_start=boom)\n"
        "def handle(message): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(cli.app, ["work", "hooked", "--url", url])
    assert done.exit_code == 1
    assert "ValueError: no answer of postgresql://me:***@host/db" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert "s3cret" not in done.output


@pytest.mark.parametrize("make", ERRORS)
def test_of_a_long_error_a_part_is_logged_in_a_moment(make: Callable[[str], Exception]) -> None:
    for atom in ("a", "a\n", "a://a:", "password='", "a@"):
        error = make(atom * ((512 << 10) // len(atom)))
        start = time.process_time()
        assert len(trace(error)) < 300_000
        assert len(of_error(error).reason or "") <= 2000
        assert time.process_time() - start < 3, atom  # what grows with the square takes minutes


def test_the_end_of_a_long_chain_is_logged() -> None:
    error: Exception = ValueError("the first one")
    for n in range(500):
        after = ValueError(f"number {n}")
        after.__cause__, error = error, after
    assert trace(error).endswith("number 499")


def test_nothing_leaves_a_traceback_to_logging() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert not {"exc_info", "stack_info"} & {each.arg for each in node.keywords}, path
                method = getattr(node.func, "attr", None)
                of = ast.unparse(node.func) if method == "exception" else ""
                assert "log" not in of, path
