"""The table of transitions in `queue/state/bundles.sql` names who writes bundles, and no others."""

import re

from spark_pgqueue.postgres import schema
from tests.measure import functions as measured
from tests.sql import core

TABLE = "queue/state/bundles.sql"
HELPERS = (TABLE, "queue/state/placing.sql")
"""Functions of these files write bundles for others, which the table names, too."""

WRITES = re.compile(
    rf"(?:insert into|update|delete from|merge into) pgqueue\.(?:{'|'.join(core.STORED)})\b"
)
STATES = {
    *("new", "unfiltered", "ready", "unassigned", "assigned", "delayed", "waiting", "claimed"),
    *("done", "dead", "removed", "any", "free", "unclaimed", "the same"),
}
"""The states in the table; `unassigned` and `assigned` are of consumers that deliver by key."""

ELSEWHERE = "as its caller says"
DUE = "the same, "  # due now, or later


def rows() -> list[tuple[str, str, str, str]]:
    """The rows of the table: from, to, function, file."""
    head = (schema.sql_directory() / TABLE).read_text().partition("\ncreate ")[0]
    found = re.findall(r"^--   (\S.*?) {2,}(\S.*?) {2,}(\w+) {2,}(\S+\.sql)$", head, re.MULTILINE)
    return [row for row in found if row[3] != "file"]


def functions() -> dict[tuple[str, str], str]:
    """The text of each function, by its name and its file. Overloads are one."""
    found: dict[tuple[str, str], str] = {}
    for each in measured.read().values():
        if "pgmq" not in each.file:
            name = (each.bare, each.file)
            found[name] = found.get(name, "") + each.text
    return found


def test_the_table_of_transitions_names_every_function_that_writes_bundles_and_its_file() -> None:
    table = rows()
    helpers = {function for _, _, function, file in table if file in HELPERS}
    calls = re.compile(rf"_pgqueue\.(?:{'|'.join(sorted(helpers))})\(")
    writers = {
        name for name, body in functions().items() if WRITES.search(body) or calls.search(body)
    }
    named = [(function, file) for _, _, function, file in table]
    assert sorted(named) == sorted(writers)


def test_the_table_of_transitions_says_states_that_there_are() -> None:
    for before, after, function, _ in rows():
        assert set(before.split(", ")) <= STATES, function
        if after != ELSEWHERE and not after.startswith(DUE):
            assert set(after.split(", ")) <= STATES, function


def test_a_function_that_leaves_the_state_to_its_caller_has_callers() -> None:
    bodies = functions()
    for _, after, function, _ in rows():
        if after == ELSEWHERE:
            call = re.compile(rf"_pgqueue\.{function}\(")
            assert any(call.search(body) for key, body in bodies.items() if key[0] != function)
