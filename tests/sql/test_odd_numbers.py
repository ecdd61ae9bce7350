"""The first and last values of numbers and times, in the place of each argument: the right answer,
or an error that says what is wrong, and never one from inside.
"""

import psycopg
import pytest

from tests.sql.queue import Conn, call, claim_of, consumer, send, value

ODD = {
    "bigint": ["9223372036854775807", "-9223372036854775808"],
    "integer": ["2147483647", "-2147483648"],
    "interval": ["178000000 years", "-178000000 years"],
    "bigint[]": ["{9223372036854775807}", "{-9223372036854775808}"],
    "integer[]": ["{2147483647}", "{-2147483648}"],
    "int8multirange": [
        "{[9223372036854775806,9223372036854775807)}",
        "{[-9223372036854775808,9223372036854775807)}",
    ],
    "timestamp with time zone": ["infinity", "-infinity", "294276-01-01", "4713-01-01 BC"],
}

USUAL = {
    "text": "s",
    "bigint": "1",
    "integer": "1",
    "interval": "1 hour",
    "boolean": "false",
    "bigint[]": "{1}",
    "integer[]": "{1}",
    "int8multirange": "{[1,2)}",
    "jsonb": "{}",
    "uuid": "5e0e5a3f-5e0e-5e0e-5e0e-5e0e5a3f5e0e",
    "timestamp with time zone": "2026-01-01",
    "numeric": "1",
    "bytea": "x",
}

TEXTS = {"p_consumer": "c", "p_table": "archived"}

OF_RECORDS = ("scan", "scan_claimed")
"""Functions whose caller says what they return."""

ARGUMENTS = """
select p.proname, array(select n from unnest(p.proargnames, coalesce(p.proargmodes, '{}')) a (n, m)
                        where coalesce(m, 'i') in ('i', 'v')),
       array(select format_type(t, null)
             from unnest(p.proargtypes) with ordinality a (t, i) order by i),
       p.pronargs - p.pronargdefaults
from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace and p.prokind = 'f' order by 1
"""


@pytest.mark.usefixtures("stream")
def test_no_argument_takes_its_first_or_last_value_to_an_error_from_inside(conn: Conn) -> None:
    consumer(conn, keep_history="1 day")
    send(conn)
    send(conn)
    value(conn, "ack", claim_of(call(conn, "receive", "s", "c", 1)))
    claim_of(call(conn, "receive", "s", "c", 1))
    found, tried = [], set()
    for name, names, types, needed in conn.execute(ARGUMENTS).fetchall():
        for place, type_ in enumerate(types):
            for odd in ODD.get(type_, []):
                given = {
                    of: odd if i == place else TEXTS.get(of) or USUAL.get(t)
                    for i, (of, t) in enumerate(zip(names, types, strict=True))
                    if i == place or i < needed
                }
                told = ", ".join(f"{of} => %s::{types[names.index(of)]}" for of in given)
                record = " as m (lo bigint, hi bigint)" if name in OF_RECORDS else ""
                tried.add((name, names[place]))
                try:
                    with conn.transaction(force_rollback=True):
                        conn.execute(
                            f"select * from pgqueue.{name}({told}){record}".encode(),
                            list(given.values()),
                        )
                except psycopg.Error as error:
                    if not (error.sqlstate or "").startswith("PQ"):
                        found.append((name, names[place], odd, str(error)))
    assert not found
    assert {("scan", "p_to"), ("read", "p_max")} <= tried
