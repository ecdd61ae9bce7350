"""Texts that others chose: of any length, they take time in proportion, and show no password."""

import ast
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

import spark_pgqueue
from spark_pgqueue.command_line.app import as_commands, one_line
from spark_pgqueue.command_line.arguments import delay
from spark_pgqueue.postgres.errors import PgQueueError, translate
from spark_pgqueue.postgres.retrying import is_passing
from spark_pgqueue.postgres.url import describe, redact
from spark_pgqueue.printable import clean, printable
from spark_pgqueue.spark.options.values import duration, size
from spark_pgqueue.spark.table_source.tables import blamed_on

ROOT = Path(spark_pgqueue.__file__).parent

ATOMS = [
    "a", "A", "0", " ", "\n", "\t", "\\", "'", '"', "@", ":", "/", "-", ".", "=", "_", "\0", "é",
    "://", "a://", "a://a:", "a@", "password", "password=", "password='", "secret ", "scram_",
    "role ", "database ", "''", "0 ", "1a", "=' ",
]  # fmt: skip
"""Each class of characters, and what patterns begin with."""

MANY = 128 << 10
"""Characters: a pattern that is tried again at each of them takes minutes."""

BOUNDED = {
    r"(\d+(?:\.\d+)?)\s*([a-zµ]+)": "duration refuses long texts first",
    r"\d+(?:\.\d+)?\s*[a-zµ]+[\s,]*": "duration refuses long texts first",
    r"^\s*java\.home = (.+)$": "what the Java of this machine says",
    r"^\s*java\.specification\.version = (?:1\.)?(\d+)": "what the Java of this machine says",
    r"<{tag}>(.*?)</{tag}>": "the package's own page",
}
"""The patterns that take longer, and why no long text of others reaches them."""


def seconds(work: Callable[[], Any]) -> float:
    """The CPU time of a call, whatever else runs on the machine."""
    start = time.process_time()
    with suppress(ValueError, PgQueueError, psycopg.Error, typer.BadParameter):
        work()
    return time.process_time() - start


def patterns() -> Iterator[tuple[str, str | bytes, str]]:
    """Each regular expression of the package: where it is, its text, and how it is used."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if (
                not isinstance(node.func.value, ast.Name)
                or node.func.value.id != "re"
                or not node.args
            ):
                continue
            text = node.args[0]
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(text, ast.Constant) and isinstance(text.value, (str, bytes)):
                yield where, text.value, _use(path.read_text(), node)
            elif isinstance(text, ast.JoinedStr):
                yield where, ast.unparse(text)[2:-1].replace("{", "").replace("}", ""), "joined"


def _use(source: str, call: ast.Call) -> str:
    """The method of `re` that is called, or of the compiled pattern."""
    assert isinstance(call.func, ast.Attribute)
    name = re.match(r"\s*(\w+) = re\.compile", source.splitlines()[call.lineno - 1])
    if call.func.attr != "compile" or name is None:
        return call.func.attr
    used = re.search(rf"\b{name[1]}\.(\w+)\(", source)
    return used[1] if used else "search"


def test_each_regular_expression_takes_time_in_proportion() -> None:
    found = list(patterns())
    assert len(found) > 35
    for where, pattern, how in found:
        if how == "joined" or pattern in BOUNDED or how == "escape":
            continue
        text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
        own = [each for each in re.findall(r"[A-Za-z_ :/'\"=.,-]{2,}", text) if each.strip()]
        compiled = re.compile(pattern, re.IGNORECASE | re.MULTILINE)
        for atom in {*ATOMS, *own, *(each + " " for each in own)}:
            for begin in ("", "0", *own[:1]):
                given = begin + atom * (8_000 // len(atom)) + "!"
                data: Any = given.encode() if isinstance(pattern, bytes) else given
                use = getattr(compiled, how if how in ("match", "fullmatch") else "sub")
                call = (
                    partial(use, data)
                    if how in ("match", "fullmatch")
                    else partial(use, data[:0], data)
                )
                assert seconds(call) < 0.1, (where, pattern, atom)


def fails_in_where(text: str) -> None:
    with blamed_on("x"):
        raise OSError(f"PGRES_FATAL_ERROR {text}")


USES: dict[str, Callable[[str], Any]] = {
    "a handler's error": clean,
    "redact": redact,
    "printable": printable,
    "a line": one_line,
    "a hint": as_commands,
    "an error": lambda text: is_passing(psycopg.OperationalError(text)),
    "an explanation": lambda text: translate(psycopg.errors.InvalidParameterValue(text)),
    "a duration": duration,
    "a size": size,
    "a delay": delay,
    "a target": lambda text: describe(f"host=h user={text!r}"),
}


@pytest.mark.parametrize("use", USES)
def test_a_long_text_of_anything_takes_a_moment(use: str) -> None:
    for atom in ATOMS:
        assert seconds(partial(USES[use], atom * (MANY // len(atom)))) < 2, atom


def test_what_the_where_of_a_query_says_is_searched_once() -> None:
    for atom in ("PGRES_FATAL_ERROR", "a", ": ERROR: "):
        start = time.process_time()
        with pytest.raises((OSError, PgQueueError)):
            fails_in_where(atom * (MANY // 4 // len(atom)))
        assert time.process_time() - start < 2


LETTERS = st.characters(codec="ascii", exclude_categories=["Cc"], exclude_characters="@/ \\'\"")
PASSWORD = st.text(LETTERS, min_size=4, max_size=20)
NOISE = st.text(st.sampled_from("ghijklm:/ .,\n"), max_size=40)


def shows(text: str, password: str) -> bool:
    return any(password[i : i + 4] in text for i in range(len(password) - 3))


@settings(max_examples=60, deadline=None)
@given(PASSWORD, NOISE, NOISE, st.sampled_from([
    "postgresql://XME:{}@xhost:5432/xdb", "http://XME:{}@xhost/", "password={} xhost",
    "sslpassword = '{}'", "postgres://:{}@xhost?a=b",
]))  # fmt: skip
def test_no_cut_shows_a_part_of_a_password(
    password: str, before: str, after: str, form: str
) -> None:
    # a "password" that the text around has too is none that could be told from it
    if shows(before + form + after + "***", password):
        return
    text = f"{before} {form.format(password)} {after}"
    for n in range(len(text) + 1):
        assert not shows(redact(text[:n]), password), text[:n]
        assert not shows(redact(text, n), password), text


@pytest.mark.parametrize("password", ["pa@ss@word", "s://x:abcd@efgh", "p4ssw0rd"])
def test_a_reason_is_cut_within_a_password_with_an_at(password: str) -> None:
    for n in range(1950, 2001):
        text = "x" * n + f" postgresql://me:{password}@host/db" + "y" * 100
        assert not shows(clean(text), password)


def test_ports_are_shown() -> None:
    text = "no answer of http://h:8080/path\nhttps://h:1/"
    assert redact(text) == text
