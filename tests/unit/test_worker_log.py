"""What the worker logs of errors: all of it, without passwords, and of a bounded length."""

import ast
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue import Consumer
from spark_pgqueue.command_line import cli
from spark_pgqueue.worker.verdicts import of_error, trace
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
