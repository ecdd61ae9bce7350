"""What a terminal would obey is not in what people read."""

import ast
import logging
import pickle
import re
from pathlib import Path

import pytest

import spark_pgqueue
from spark_pgqueue import PgQueueError
from spark_pgqueue.printable import printable, text_of, warn

ESCAPE = "\x1b[31mred\u202e\x9b\r"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LOGS = re.compile(r"(^|\.)warn$|\blog\w*\.(debug|info)$")


def test_letters_of_all_languages_stay_and_controls_are_escaped():
    assert printable("hä 你好 \u3000\u00a0 🙂") == "hä 你好 \u3000\u00a0 🙂"
    assert printable(ESCAPE) == r"\x1b[31mred\u202e\x9b\r"
    assert printable("a\nb\tc") == r"a\nb\tc"
    assert printable("a\nb\x07", keep="\n") == "a\nb" + r"\x07"


def test_errors_hold_no_control_character():
    error = pickle.loads(pickle.dumps(PgQueueError(f"no {ESCAPE}", hint=f"make\n{ESCAPE}")))
    assert "\x1b" not in str(error) + error.message + (error.hint or "")
    assert (error.message, error.hint) == (f"no {printable(ESCAPE)}", f"make\n{printable(ESCAPE)}")


def test_a_name_of_the_database_comes_escaped_in_errors(url):
    with (
        spark_pgqueue.connect(url) as queue,
        pytest.raises(PgQueueError, match="unknown stream") as error,
    ):
        queue.send(ESCAPE, "x")
    assert printable(ESCAPE).replace("\\", "") in str(error.value).replace("\\", "")
    assert not {"\x1b", "\u202e", "\x9b"} & set(str(error.value))


def test_warnings_hold_no_control_character(caplog):
    with caplog.at_level(logging.WARNING):
        warn("%d messages of %s: %s", 3, ESCAPE, ValueError(ESCAPE))
    assert caplog.messages == [
        f"3 messages of {printable(ESCAPE)}: ValueError: {printable(ESCAPE)}"
    ]
    assert caplog.records[0].name == "spark_pgqueue"


def test_no_other_code_logs_an_error():
    """`warn` shows each error in the same way, without passwords, and cannot fail."""
    root = Path(spark_pgqueue.__file__).parent
    logs = re.compile(r"\blog\w*\.(warning|error|exception|critical|log)\(")
    assert not [path.name for path in root.rglob("*.py") if logs.search(path.read_text())]


def logged(tree):
    """Each call of a module that logs: the call, and its format with its values.

    A name stands for what the same function gives it.
    """
    functions = [each for each in ast.walk(tree) if isinstance(each, FUNCTIONS)]
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not LOGS.search(ast.unparse(call.func)):
            continue
        around = [each for each in functions if call in ast.walk(each)]
        named = {
            ast.unparse(each.targets[0]): each.value
            for each in ast.walk(around[-1])
            if isinstance(each, ast.Assign)
        }
        form, *values = call.args
        for each in [each for each in values if isinstance(each, ast.Starred)]:
            given = named.get(ast.unparse(each.value), each.value)
            assert isinstance(given, ast.Tuple)
            values += given.elts[1:]
        yield call, named.get(ast.unparse(form), form), len(values)


def test_each_line_of_the_log_takes_its_values():
    """`warn` gives text, of which `%s` and `%r` take any; and there are as many of both."""
    root, seen = Path(spark_pgqueue.__file__).parent, 0
    for path in root.rglob("*.py"):
        for call, form, values in logged(ast.parse(path.read_text())):
            at = f"{path.name}:{call.lineno}: {ast.unparse(form)}"
            assert isinstance(form, ast.Constant), at
            places = re.findall(r"%(?!%)(.)", str(form.value).replace("%%", ""))
            assert set(places) <= {"s", "r"}, at
            assert len(places) == values, at
            seen += 1
    assert seen > 40


def test_a_number_of_a_line_stays_a_number(caplog):
    warn("%d of %g s, and %s", 3, 2.5, 0.1)
    assert caplog.messages == ["3 of 2.5 s, and 0.1"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("7"), "ValueError: 7"),
        (KeyError(), "KeyError"),
        (PgQueueError("no stream", hint="see", sqlstate="PQ001"), "[PQ001] no stream Hint: see"),
        (OSError("password=secret x"), "OSError: password=*** x"),
    ],
)
def test_an_error_in_a_line_of_the_log(error, text):
    assert text_of(error) == text
