"""Values on their way into a table: each is what was sent, or is refused (`sql/table_sink/table_fit.sql`).

All pairs of types are played, not a list of those that somebody thought of.
"""
# ruff: noqa: E501  a case is a line

import itertools
import random
import struct
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.conftest import VERSIONS
from tests.sql.odd import SETTINGS, accepted
from tests.sql.queue import Conn, Session, one
from tests.sql.table_writes import Write, content, refusal, target, write

pytestmark = pytest.mark.all_versions

RANDOM = random.Random(5)


def _single(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


def _decimals(precision: int, scale: int) -> list[str]:
    digits = ["0", "1", "-1", "9" * precision, "-" + "9" * precision, "1" + "0" * (precision - 1)]
    digits += [str(RANDOM.randrange(10**precision)) for _ in range(6)]
    return [format(Decimal(each).scaleb(-scale, Context(prec=60)), "f") for each in digits]


_WHOLE = {"tinyint": 7, "smallint": 15, "int": 31, "bigint": 63}
_MICROSECONDS = ["2024-03-31 01:30:00.123456", "1969-12-31 23:59:59.999999", "2024-10-27 02:30:00", "0001-01-01 00:00:00.000001", "9999-12-31 23:59:59.5"]  # fmt: skip
_DOUBLES = [0.0, -0.0, 0.1, 1 / 3, 1.04, 1.01, 123456789012345.67, 2.0**53 + 2, 1e22, 5e-324, 1.7976931348623157e308, float("inf"), float("nan"), *(RANDOM.uniform(-1e6, 1e6) for _ in range(5))]  # fmt: skip
_SINGLES = [0.0, 0.1, 16777216.0, 16777218.0, 1 / 3, 123456.789, 3.4e38, 1e-45, float("-inf"), float("nan")]  # fmt: skip

SENT: dict[str, list[Any]] = {
    "boolean": ["true", "false"],
    **{
        name: [0, 1, -1, -(2**bits), 2**bits - 1, *(RANDOM.getrandbits(bits) for _ in range(6))]
        + ([2**24 + 1, 2**53 + 1] if bits == 63 else [2**24 + 1] if bits == 31 else [])
        for name, bits in _WHOLE.items()
    },
    **{
        f"decimal({p},{s})": _decimals(p, s)
        for p, s in ((5, 0), (6, 3), (7, 3), (10, 2), (15, 15), (16, 2), (19, 0), (38, 18), (5, -2))
    },
    "double": _DOUBLES,
    "float": [_single(each) for each in _SINGLES],
    "date": ["2024-02-29", "0001-01-01", "9999-12-31"],
    "timestamp": [f"{each}+00" for each in _MICROSECONDS],
    "timestamp_ntz": _MICROSECONDS,
    "interval day to second": ["1 day 01:02:03.000001", "-00:00:00.5", "400 days", "00:01:00"],
    "binary": ["\\x", "\\x00ff"],
}
"""Values of each type of Spark, as COPY takes them."""

TARGETS = [
    *("boolean", "smallint", "integer", "bigint", "oid", "real", "double precision", "money"),
    *("numeric", "numeric(38,18)", "numeric(12,2)", "numeric(6,1)", "numeric(5,0)"),
    *("numeric(5,-2)", "date", "time", "timetz", "interval"),
    *("interval(0)", "interval(3)", "interval(6)", "interval day", "interval day to second"),
    *("interval day to second(2)", "interval minute to second", "interval year to month"),
    *(f"{name}{p}" for name in ("timestamp", "timestamptz") for p in ("", "(0)", "(3)", "(6)")),
    *("text", "varchar(3)", "char(3)", "name", '"char"', "bytea", "bit(3)", "uuid", "jsonb"),
]


def is_number(spark: str) -> bool:
    """Whether values are compared here; Postgres compares others."""
    return spark in ("float", "double") or spark in _WHOLE or spark.startswith("decimal")


def is_same(spark: str, sent: Any, stored: str) -> bool:
    """Whether a number that was read back is the one that was sent."""
    if spark not in ("float", "double"):
        return Decimal(stored) == Decimal(sent)
    number = float(stored)
    if spark == "float" and abs(number) < 3.5e38:
        number = _single(number)
    return number == sent or str(number) == str(sent) == "nan"


@pytest.fixture
def odd(conn: Conn, session: Session) -> Conn:
    """A writer whose settings change how values look as text."""
    writer = session()
    settings = SETTINGS | {"extra_float_digits": "-15", "TimeZone": "Europe/Berlin"}
    for name, setting in accepted(settings, conn.info.server_version // 10000).items():
        if name not in ("client_encoding", "search_path"):
            writer.execute(
                sql.SQL("set {} = {}").format(
                    sql.Identifier(*name.split(".")), sql.Literal(setting)
                )
            )
    conn.execute("set timezone = 'UTC'")
    return writer


def arrived(conn: Conn, spark: str, stored: str, given: list[Any], array: bool) -> list[str]:
    """Values of t that are not what was sent."""
    staged = one(conn, f"select _pgqueue.staged_type('{spark}')")
    # A date may be in a timestamp: it is read back as what was sent.
    same = "true" if is_number(spark) else f"shown::{staged} = sent::{staged}"
    found = conn.execute(
        f"select id, shown, {same} from s join t using (id),"
        f" lateral (select {'v[1]' if array else 'v'}::text as shown) x order by id".encode()
    )
    return [
        f"{spark} into {stored}: {given[n]!r} became {shown}"
        for n, shown, same in found
        if not (is_same(spark, given[n], shown) if is_number(spark) else same)
    ]


def code_of(call_: Callable[..., Any], *given: Any, **named: Any) -> str | None:
    """The SQLSTATE of an error; None without one."""
    try:
        call_(*given, **named)
    except psycopg.Error as error:
        return error.sqlstate
    return None


def play(conn: Conn, odd: Conn, given: dict[str, Any], values: list[Any], array: bool) -> None:
    """Write values into t, those that fit; s has what was sent."""
    conn.execute("delete from t; delete from s")  # another table would be planned for once more
    with conn.cursor() as cursor:
        sent = [(n, str(each)) for n, each in enumerate(values)]
        cursor.executemany("insert into s values (%s, %s)", sent)
    escaped = [(n, f'{{"{each}"}}'.replace("\\", "\\\\") if array else each) for n, each in sent]
    sink = f"sink {next(_sinks)}"
    if code_of(write, odd, given, *escaped, sink=sink) is not None:
        for batch, row in enumerate(escaped, 1):
            code = code_of(write, odd, given, row, sink=sink, batch=batch)
            assert code is None or code[:2] == "22", (given, row, code)


_sinks = itertools.count(1)


@pytest.mark.parametrize(
    "shape",
    ["domain[]", *(pytest.param(each, marks=pytest.mark.longer) for each in ("{}", "domain"))],
)
@pytest.mark.timeout(300)
def test_of_all_pairs_of_types_a_value_is_what_was_sent_or_is_refused(
    conn: Conn, odd: Conn, shape: str
) -> None:
    if shape != "domain[]" and conn.info.server_version // 10000 != VERSIONS[0]:
        pytest.skip("of an older version, arrays of domains are enough: they have both")
    wrong, taken, array = [], 0, shape.endswith("[]")
    conn.execute("create table s (id int, sent text)")
    for stored in TARGETS:
        conn.execute(
            f"drop domain if exists public.kept cascade; create domain public.kept as {stored}".encode()
        )
        column = (
            f"public.kept{'[]' if array else ''}" if "domain" in shape else shape.format(stored)
        )
        conn.execute(
            f"drop table if exists public.t; create table public.t (id int, v {column})".encode()
        )
        for spark, values in SENT.items():
            given = target("public.t", {"id": "int", "v": f"array<{spark}>" if array else spark})
            if (code := code_of(Write, odd, given)) is not None:
                assert code == "PQ003", (spark, stored)
                continue
            taken += 1
            play(conn, odd, given, values, array)
            wrong += arrived(conn, spark, stored, values, array)
    assert not wrong, "\n".join(wrong)
    assert taken > 100, "the judge refuses nearly all"


ROUNDING = [
    ("timestamp", "timestamptz(3)"),
    ("timestamp", "timestamptz(0)"),
    ("timestamp_ntz", "timestamp(3)"),
    ("bigint", "double precision"),
    ("bigint", "real"),
    ("int", "real"),
    ("double", "real"),
    ("double", "numeric(12,2)"),
    ("float", "numeric(12,2)"),
    ("decimal(10,2)", "numeric(10,1)"),
    ("decimal(10,2)", "real"),
    ("decimal(38,18)", "double precision"),
    ("int", "numeric(10,-1)"),
]


@pytest.mark.parametrize("allowed", [[], ["id", "at"]])
def test_keys_and_sequences_that_could_round_are_refused_and_a_wider_column_takes_them(
    conn: Conn, allowed: list[str]
) -> None:
    for spark, stored in ROUNDING:
        for key, at, says in ((spark, "int", "two keys of p_merge_keys could become one"),
                              ("int", spark, "with p_sequence_by, an older row could remain")):  # fmt: skip
            rounds = "id" if key == spark else "at"
            conn.execute("create table public.t (id int primary key, at int)")
            conn.execute(f"alter table t alter {rounds} type {stored} using null".encode())
            given = target("public.t", {"id": key, "at": at}, ["id"], sequence_by="at")
            error = str(refusal(lambda g=given: Write(conn, g | {"allow_rounding": allowed})))
            assert f"column {rounds} is {spark}, and" in error
            assert "would round its values" in error
            assert (says in error) or key == at, (spark, stored)
            wider = error.split("Change the type of the column to ")[1].split(". Or cast")[0]
            conn.execute(f"alter table t alter {rounds} type {wider} using null".encode())
            assert Write(conn, given)
            conn.execute("drop table t")


def test_a_plain_column_rounds_where_allow_rounding_names_it_and_nowhere_else(conn: Conn) -> None:
    conn.execute(
        "create table public.t (id int primary key, v numeric(12,2), w numeric(12,2), s varchar(2))"
    )
    columns = {"id": "int", "v": "double", "w": "double", "s": "string"}
    given = target("public.t", columns, ["id"])
    assert "column v is double" in str(refusal(lambda: Write(conn, given)))
    assert "column w is double" in str(
        refusal(lambda: Write(conn, given | {"allow_rounding": ["V"]}))
    )
    assert write(conn, given | {"allow_rounding": ["v", "w", "s"]}, (1, 123456789.015, 2.5, "a "))
    assert content(conn, "t") == [(1, Decimal("123456789.02"), Decimal("2.50"), "a ")]
    error = refusal(lambda: Write(conn, given | {"allow_rounding": ["amount"]}))
    assert (
        "p_allow_rounding must name a column of the DataFrame, not 'amount': it has id, v, w, s"
        in str(error)
    )


LOST = [
    ("varchar(3)", "abc ", "abc"),
    ("varchar(3)[]", '{"abc "}', "{abc}"),
    ("short", "abc ", "abc"),
    ("short[]", '{"abc "}', "{abc}"),
    ("name", "a" * 64, "a" * 63),
    ('"char"', "ab", "a"),
    ("numeric(5,2)", "1.234", "1.23"),
    ("numeric(5,2)[]", "{1.234}", "{1.23}"),
    ("double precision", "123456789012345678", "123456789012345680"),
    ("real", "16777217", "16777216"),
    ("real[]", "{0.123456789}", "{0.12345}"),
    ("oid", "-1", "1"),
    ("date", "2024-01-01 12:00", "2024-01-01"),
    ("timestamp(0)", "2024-01-01 00:00:00.6", "2024-01-01 00:00:00"),
    ("timestamp", "2024-10-27 02:30:00+02", "2024-10-27 02:30:00"),
    ("timestamp", "2024-10-27 02:30:00 Europe/Berlin", "2024-10-27 02:30:00"),
    ("timestamp", "2024-01-01 00:00:00.1234567", "2024-01-01 00:00:00.123456"),
    ("timestamptz", "2024-01-01 00:00:00.1234567+00", "2024-01-01 00:00:00.123456+00"),
    ("timestamptz(3)", "2024-01-01 00:00:00.1234+00", "2024-01-01 00:00:00.123+00"),
    ("time(0)", "12:00:00.5", "12:00:00"),
    ("time", "12:00:00+02", "12:00:00"),
    ("interval(0)", "1.5 s", "1 s"),
    ("interval day", "1 day 2 hours", "1 day"),
    ("tstzrange", "[2024-01-01 00:00:00.1234567Z,)", "[2024-01-01 00:00:00.123456Z,2024-01-02)"),
    ("tstzrange[]", '{"(,2024-01-01 00:00:00.1234567Z]"}', '{"(,2024-01-01 00:00:00.1Z]"}'),
    ("tstzmultirange", "{[2024-01-01 00:00:00.1234567Z,)}", "{(,2024-01-01 00:00:00.12+05:30]}"),
    ("tsrange", "(,2024-10-27 02:30:00+02]", "(,2024-10-27 02:30:00]"),
    ("tsmultirange", "{(,2024-10-27 02:30:00+02]}", "{(,2024-10-27 02:30:00],[2025-01-01,)}"),
    ("daterange", "[2024-01-01,2024-01-02 12:00)", "[2024-01-01,2024-01-02]"),
    ("datemultirange", "{[2024-01-01,2024-01-02 12:00)}", "{[2024-01-01,2024-01-02]}"),
]
"""A type, text that loses something there, and text that does not."""


def test_text_that_a_column_would_cut_or_round_fails_the_batch(conn: Conn, odd: Conn) -> None:
    conn.execute("create domain public.short as varchar(3)")
    odd.execute("set datestyle = 'ISO'")
    for n, (stored, loses, fits) in enumerate(LOST):
        conn.execute(f"create table public.t (id int, v {stored})".encode())
        for spark, wrap in (("string", "{}"), ("array<string>", '{{"{}"}}')):
            if (spark == "string") == stored.endswith("[]"):
                continue
            if spark == "array<string>":
                loses, fits = loses.strip('{}"'), fits.strip('{}"')
            given = target("public.t", {"id": "int", "v": spark})
            with pytest.raises(psycopg.errors.StringDataRightTruncation, match="text of column v"):
                write(odd, given, (1, wrap.format(loses)), sink=f"loses {n}")
            assert content(conn, "t") == []
            assert write(odd, given, (1, wrap.format(fits)), sink=f"fits {n}"), (stored, fits)
            assert write(
                odd, given | {"allow_rounding": ["v"]}, (1, wrap.format(loses)), sink=f"may {n}"
            )
        conn.execute("drop table t")
    assert odd.execute("show timezone").fetchall()[0][0] == "Europe/Berlin"


EXACT = [
    ("bigint", "bigint", [2**53 + n for n in range(4)]),
    ("bigint", "numeric(20,0)", [2**62 + n for n in range(4)]),
    ("double", "numeric", [123456789012345.67, 123456789012345.69, 0.1 + 0.2, 0.3]),
    ("double", "double precision", [0.1, 0.1 + 2**-55, -0.0, float("inf")]),
    ("float", "numeric", [_single(16777216 + 2 * n) for n in range(4)]),
    ("float", "double precision", [_single(0.1), _single(0.2), 0.0, -1.0]),
    ("decimal(15,4)", "double precision", [f"12345678901.{n:04}" for n in range(4)]),
    ("decimal(38,18)", "numeric(38,18)", [f"12345678901234567890.{n:018}" for n in range(4)]),
    ("timestamp", "timestamptz", [f"2024-10-27 00:30:00.00000{n}+00" for n in range(4)]),
    ("timestamp_ntz", "timestamp(6)", [f"2024-10-27 02:30:00.00000{n}" for n in range(4)]),
    ("date", "timestamp", [f"2024-10-{26 + n}" for n in range(4)]),
]
"""Types that go together as keys and sequences, and values that are close to each other."""


def test_the_last_row_of_a_key_wins_in_batches_and_against_stored_rows(
    conn: Conn, odd: Conn
) -> None:
    """Against a small model, with deletes and batches that are repeated."""
    for sink, (spark, stored, values) in enumerate(EXACT):
        conn.execute(
            f"create table public.t (id {stored} primary key, at {stored}, v text)".encode()
        )
        columns = {"id": spark, "at": spark, "v": "string", "gone": "boolean"}
        given = target("public.t", columns, ["id"], sequence_by="at", delete_when="gone")
        check_last_rows(odd, given, sorted(values), f"sink {sink}")
        conn.execute("drop table public.t")


def check_last_rows(conn: Conn, given: dict[str, Any], order: list[Any], sink: str) -> None:
    """Batches of random rows, whose keys and sequences are the values of an order."""
    rng, model = random.Random(7), {}
    for batch in range(8):
        rows = [(k, a, rng.random() < 0.25) for k, a in ((rng.randrange(4), rng.randrange(4)) for _ in range(rng.randrange(1, 7)))]  # fmt: skip
        last: dict[int, tuple[int, bool]] = {}
        for key, at, gone in rows:
            last[key] = max(last.get(key, (-1, False)), (at, gone))
        for key, (at, gone) in last.items():
            if gone and model.get(key, 9) <= at:
                del model[key]
            elif not gone and model.get(key, -1) < at:
                model[key] = at
        staged = [(order[k], order[a], f"{k}-{a}", gone) for k, a, gone in rows]
        assert write(conn, given, *staged, batch=batch, sink=sink)
        if rng.random() < 0.5:
            again = write(conn, given, *staged, batch=batch, sink=sink)
            assert not again, "Spark repeats the batch"
        found = conn.execute("select v from t order by id").fetchall()
        assert [row[0] for row in found] == [f"{k}-{model[k]}" for k in sorted(model)], batch


def test_a_text_that_would_round_is_no_key_with_allow_rounding_too(conn: Conn) -> None:
    for stored, loses in (("varchar(2)", "ab "), ("timestamptz(0)", "2024-01-01 00:00:00.4Z"),
                          ("numeric(5,2)", "1.001"), ("real", "0.123456789")):  # fmt: skip
        conn.execute(f"create table public.t (id {stored} primary key, v text)".encode())
        given = target("public.t", {"id": "string", "v": "string"}, ["id"], allow_rounding=["id"])  # type: ignore[arg-type]
        with pytest.raises(psycopg.errors.StringDataRightTruncation, match="text of column id"):
            write(conn, given, (loses, "a"), sink=f"sink {stored}")
        conn.execute("drop table t")


def test_of_rows_with_one_key_and_one_sequence_always_the_same_stays(conn: Conn) -> None:
    """Tasks stage in another order when a batch is repeated. Types without an order are no harm."""
    conn.execute("create table public.t (id int primary key, at bigint, v json, w text, n point)")
    columns = {"id": "int", "at": "int", "v": "string", "w": "string", "n": "string"}
    given = target("public.t", columns, ["id"], sequence_by="at")
    rows = [(1, 5, f'{{"a": {n % 3}}}', w, "(1,2)") for n in range(20) for w in ("ä", "b", None)]
    found = set()
    for batch in range(6):
        conn.execute("truncate t")
        RANDOM.shuffle(rows)
        assert write(conn, given, *rows, (1, 4, '{"a": 9}', "z", None), batch=batch)
        found.add(str(content(conn, "t")))
    assert found == {str([(1, 5, {"a": 2}, "ä", "(1,2)")])}
