"""The client calls SQL functions by the names of their arguments, which exist."""

import ast
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue import client
from spark_pgqueue.client.calls.base import Calls, _described, statement

CLIENT = Path(client.__file__).parent
METHODS = (Calls._call, Calls._rows, Calls._long_call, Calls._long_rows, Calls._read)
CALLERS = {each.__name__ for each in (*METHODS, statement)}

MADE = {
    "arguments.payload": ["data", "data_bytes"],
    "arguments.earliest": ["deliver_at"],  # or delay, which becomes it
}
"""The arguments that a function makes a mapping of."""


def names_in(given: ast.expr, within: ast.AST) -> list[str]:
    """The names of arguments that a mapping has, which is made in a function."""
    if isinstance(given, ast.Dict):
        return [ast.literal_eval(key) for key in given.keys if key is not None]
    if isinstance(given, ast.BinOp):
        return names_in(given.left, within) + names_in(given.right, within)
    if isinstance(given, ast.Call):
        return MADE[ast.unparse(given.func)]
    assert isinstance(given, ast.Name)
    made = [
        each.value
        for each in ast.walk(within)
        if (isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == given.id)
        or (isinstance(each, ast.AugAssign) and ast.unparse(each.target) == given.id)
    ]
    return [name for each in made for name in names_in(each, within)]


def calls() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each call of an SQL function: its name, and the client's names of the arguments."""
    for file in sorted(CLIENT.rglob("*.py")):
        for within in ast.walk(ast.parse(file.read_text())):
            if not isinstance(within, ast.FunctionDef):
                continue
            for call in ast.walk(within):
                if not isinstance(call, ast.Call):
                    continue
                caller, *given = [call.func, *call.args]
                if ast.unparse(caller) == "partial":
                    caller, *given = given
                name = ast.unparse(caller).split(".")[-1]
                texts = [
                    ast.literal_eval(each) for each in given[:1] if isinstance(each, ast.Constant)
                ]
                if name in CALLERS and texts:
                    named = [each.arg for each in call.keywords if each.arg is not None]
                    others = [each.value for each in call.keywords if each.arg is None]
                    others += given[2:] if name == "statement" else []
                    found = [*named, *(n for each in others for n in names_in(each, within))]
                    yield texts[0], tuple(found)


CALLS = sorted(set(calls()))


def test_most_functions_are_called_by_these():
    assert len(CALLS) > 55
    assert {"send", "send_batch", "receive", "receive_where", "ack"} <= {name for name, _ in CALLS}


def test_each_argument_is_one_of_the_sql_function_and_of_its_type(conn: psycopg.Connection):
    wrong = []
    for function, names in CALLS:
        sql = _described(function, "", names)[0].replace("%s", "null").replace("%b", "null")
        try:
            conn.execute(f"prepare a_call as {sql}".encode())
            conn.execute("deallocate a_call")
        except psycopg.Error as error:
            wrong.append(f"{sql}: {error.diag.message_primary}")
    assert not wrong, "\n".join(wrong)


def test_an_argument_that_is_none_of_the_function_is_found(conn: psycopg.Connection):
    sql = _described("ack", "", ("claim_id", "reason"))[0].replace("%s", "null")
    with pytest.raises(psycopg.errors.UndefinedFunction):
        conn.execute(f"prepare a_call as {sql}".encode())
