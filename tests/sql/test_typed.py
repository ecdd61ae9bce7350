"""One judge of typed payloads: what a send takes is what Spark reads, in a batch of any size."""

import json
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from spark_pgqueue.spark.executor import typed
from tests.payloads import FIT, NO_FIT
from tests.sql.queue import Conn, one, value
from tests.unit.test_typed import TYPES

DEEP = "[" * 1500 + "]" * 1500
DEEP_OBJECT = '{"a":' * 1500 + "1" + "}" * 1500
LONG = "9" * 5000

ODD_TEXTS = [
    "+1", "1e2", "-0", "007", ".5", "5.", " 1", "1 ", "1.500", "-1.25", "0.5", "1.25", "NaN",
    "Infinity", "-inf", "true", "null", "١٢", "\uff11", "0x1", "1_000", "", " ",
    "2026-01-31", "2026-1-31", "02026-01-31", "+2026-01-31", "20260131", "0000-01-01", "0001-01-01",
    "9999-12-31", "10000-01-01", "-0001-01-01", "2023-02-29", "1900-02-29", "2026-01-31 ",
    " 2026-01-31", "2026-01-31\n", "2026-01-31T12Z", "2026-01-31T12", "2026-01-31T12:00",
    "2026-01-31T12:00Z", "2026-01-31T12:00:00", "2026-01-31 12:00:00Z", "2026-01-31t12:00:00z",
    "2026-01-31T12:00:60Z", "2026-01-31T24:00:00Z", "2026-01-31T12:00:00.1234567Z",
    "2026-01-31T12:00:00.", "2026-01-31T12:00:00+14:59", "2026-01-31T12:00:00+15:00",
    "2026-01-31T12:00:00+01", "2026-01-31T12:00:00+0100", "2026-01-31T12:00:00 +01:00",
    "2026-01-31T12:00:00-00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00",
    "2026-01-31T12:00:00 Europe/Zurich", "\uff11\uff12-01-31", "infinity", "epoch", "now",
    "aGk=", "aGk", "aG==", "aGl=", "====", "aGk=\n", "aG k=", "a-_=", "aGk=aGk=", "a" * 4000,
]  # fmt: skip
ODD_JSON = [
    "-0", "-0.0", "0e5", "1e2", "1E+2", "1e-2", "12.50", "12.500", "0.1", "1.0", "1e400", "1e-400",
    "1e200000", "1e-20000", "0e200000", "0e-20000", "1e99999999999999999999", "0." + "0" * 20000,
    "1" + "0" * 131071, "1" + "0" * 131072, "0." + "0" * 16382 + "1", LONG, "-" + LONG, "0." + LONG,
    "127", "128", "-128", "-129", "32768", "2147483648", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "9" * 38, "1" + "0" * 38,
    "999.99", "999.995", "1000", "0.99", "3.4028235e38", "3.40282356e38", "3.40282355999e38",
    "1.7976931348623157e308", "1.7976931348623158e308", "1.79769313486231579e308",
    "-1.7976931348623158e308", "5e-324", "1e-324", "true", "false", "null", "[]", "{}", "[null]",
    "[[]]", "[1, null]", '["1"]', "[1.0]", "[-0]", '{"a": 1}', '{"a": null}', '{"a": 1, "a": null}',
    '{"a": null, "a": 1}', '{"a": 1.5}', '{"A": 1}', '[{"a": 1}, {}]', '[{"a": 1}, null]',
    '[{"at": "2026-01-31"}]', '[{"at": "2026-01-31T12Z"}]', '{"a": 1, "b": "x", "c": []}', DEEP,
    DEEP_OBJECT, f'{{"a": 1, "c": {DEEP}}}', "NaN", "-Infinity", "Infinity", "+1", ".5", "5.", "01",
    "'a'", "tru", "", "1 2", "// c", '"\\u0000"', '"\\\\u0000"', '"\\\\\\u0000"', '"\\ud800"',
    '"\\udc00"', '"\\ud83d\\ude00"', '"\\udc00\\ud800"', '"\\\\ud800"', '"\\u00e4"', '"\\x"',
    '"\\u12"', '"\\u002b1"', '"1\\u00652"',
    '"\t"', '"\x7f"', '"\u2028"', '"\ufeff"', "1.5e99999", '"1, -1e99999"',
]  # fmt: skip
TEMPLATES = [
    '{"v": %s}', ' \t\r\n{ "v"\n:\t%s }\n', '{"v": %s, "w": 1}', '{"v": null, "w": %s}',
    '{"w": %s}', '{"v": null, "v": %s}', '{"v": %s, "v": null}', '{"\\u0076": %s}', '{"V": %s}',
    '{"v": [%s]}', '{"v": {"a": %s}}', '{"w": {"v": [%s]}}', "%s", '[{"v": %s}]', '{"v": %s} {}',
    '{"v": %s,}', '{"\\u0000": 1, "v": %s}', '{"\\udead": 1, "v": %s}', '{"w": "\\u0000", "v": %s}',
]  # fmt: skip

NUMBERS = st.from_regex(r"-?[0-9]{1,3}([.][0-9]{1,3})?([eE][-+]?[0-9]{1,6})?", fullmatch=True)
STAMPS = st.from_regex(
    r"[0-9]{4}-[01][0-9]-[0-3][0-9]([T ]?[0-2][0-9](:[0-6][0-9]){0,2}([.][0-9]{0,7})?)?"
    r"(Z|[-+][0-9]{2}:?[0-9]{0,2})?",
    fullmatch=True,
)
TEXTS = st.sampled_from(ODD_TEXTS) | STAMPS | NUMBERS | st.text(max_size=5).filter(
    lambda text: "\0" not in text and text.isprintable()
)  # fmt: skip
JSON = (
    st.sampled_from(ODD_JSON)
    | st.sampled_from([text for _, text, *_ in [*FIT, *NO_FIT]])
    | NUMBERS
    | TEXTS.map(lambda text: json.dumps(text, ensure_ascii=False))
    | TEXTS.map(json.dumps)
)

ACCEPTS = """
create function pg_temp.accepts(p_stream text, p_data text) returns boolean
language plpgsql as $$
begin
    perform pgqueue.send(p_stream, p_data);
    return true;
exception when sqlstate 'PQ004' then
    return false;
end $$
"""

VALUES = {
    "boolean": "to_jsonb((j ->> 'v')::boolean)",
    "date": "to_jsonb((j ->> 'v')::date - '1970-01-01')",
    "timestamp": "to_jsonb(extract(epoch from (j ->> 'v')::timestamptz) * 1000000)",
    "timestamp_ntz": "to_jsonb(extract(epoch from (j ->> 'v')::timestamp) * 1000000)",
    "binary": "to_jsonb(encode(decode(j ->> 'v', 'base64'), 'hex'))",
    "string": "to_jsonb(j ->> 'v')",
}


def read(type_: str, texts: list[str]) -> list[dict[str, Any] | None]:
    """The structs of messages in one batch; null for those that do not fit."""
    batch = pa.record_batch({"seq": list(range(len(texts))), "data": texts})
    struct = pa.struct([("v", TYPES[type_])])
    target = pa.schema([("seq", pa.int64()), ("data", pa.string()), ("value", struct)])
    found = typed.typed(batch, target, "s")
    found.validate(full=True)
    temporal = pa.types.is_temporal(TYPES[type_])  # Python has no year 10000
    column = found.field("v")
    if temporal:
        column = column.cast(pa.int32() if type_ == "date" else pa.int64())
    return [
        {"v": v} if there else None
        for v, there in zip(column.to_pylist(), found.is_valid().to_pylist(), strict=True)
    ]


@pytest.fixture
def judged(conn: Conn) -> Conn:
    """A connection to a queue with a stream for each type."""
    conn.execute(ACCEPTS)
    for type_ in TYPES:
        schema = Jsonb({"schema": f"v {type_}"})
        value(conn, "create_stream", type_, "json", p_settings=schema)
    return conn


def check_same(conn: Conn, type_: str, texts: list[str]) -> None:
    """SQL's verdict, Python's way and Arrow's way are one, and so are the values."""
    query = "select array_agg(pg_temp.accepts(%s, t) order by i) from unnest(%s::text[]) " \
            "with ordinality u (t, i)"  # fmt: skip
    accepted = one(conn, query, type_, texts)
    for text, fits in zip(texts, accepted, strict=True):
        (alone,) = read(type_, [text])
        shown = (type_, text if len(text) < 200 else f"{text[:100]}...{text[-50:]}")
        assert (alone is not None) == fits, (shown, alone)
        many = read(type_, [text] * 9)
        assert many == [alone] * 9, shown
        assert repr(many[0]) == repr(alone), shown
    good = [text for text, fits in zip(texts, accepted, strict=True) if fits]
    if good:
        alone = [read(type_, [text])[0] for text in good]
        assert read(type_, good * 9) == alone * 9
        check_values(conn, type_, good, alone)


def check_values(conn: Conn, type_: str, texts: list[str], found: list[Any]) -> None:
    """What was read is what jsonb has."""
    if type_ not in VALUES and ("<" in type_):
        return
    sql = VALUES.get(type_, "j -> 'v'")
    wanted = conn.execute(
        f"select {sql} #>> '{{}}' from unnest(%s::text[]) with ordinality u (t, i), "
        "lateral (select t::jsonb) j (j) order by i".encode(),
        [texts],
    ).fetchall()
    for text, (there,), value_ in zip(texts, wanted, found, strict=True):
        got = value_["v"]
        if got is None or there is None:
            assert (got is None and there is None) or there == "null", (type_, text)
        elif type_ == "binary":
            assert got.hex() == there
        elif type_ == "float":
            assert got == pa.scalar(float(there), pa.float32()).as_py()
        elif type_ in ("string", "boolean"):
            assert str(got).lower() == there.lower(), (type_, text)
        elif type_ == "double":
            assert got == float(there), (type_, text)
        else:
            assert one(conn, "select %s::numeric = %s::numeric", str(got), there), (type_, text)


def test_the_texts_of_a_type_are_those_of_the_server(conn: Conn) -> None:
    fits = dict(conn.execute("select type, fits from _pgqueue.schema_types()").fetchall())
    texts = {"date": "DAY", "timestamp": "ZONED", "timestamp_ntz": "MOMENT", "binary": "BASE64"}
    for type_, name in texts.items():
        assert f'like_regex "^{getattr(typed, name)}$"' in fits[type_]
    for type_, most in typed.LARGEST.items():
        assert f"@ < {str(most).lower().replace('e+', 'e')}" in fits[type_]
    for type_ in (t for t in TYPES if t.startswith("decimal")):
        (path,) = one(conn, "select _pgqueue.read_schema(%s)", f"v {type_}")["fields"]
        sql = one(conn, "select _pgqueue.type_fits(%s)", Jsonb(path["type"]))
        assert f'like_regex "^{typed.text_of(TYPES[type_])}$"' in sql


@pytest.mark.longer
def test_what_is_sent_is_read_alike_in_batches_of_any_size(judged: Conn) -> None:
    """Each odd value in ten types, others in each run, as the member and beside it."""
    values_ = [*ODD_JSON, *(json.dumps(text) for text in ODD_TEXTS)]
    values_ += [text for _, text, *_ in [*FIT, *NO_FIT]]
    for type_ in random.sample(sorted(TYPES), 10):
        check_same(judged, type_, [f'{{"v": {each}}}' for each in values_ if len(each) < 6000])
    for type_ in ("bigint", "double", "decimal(5, 2)", "struct<a: int>"):
        check_same(judged, type_, [f'{{"v": {each}}}' for each in values_ if len(each) >= 6000])
    for template in TEMPLATES:
        check_same(judged, "bigint", [template.replace("%s", each) for each in ODD_JSON])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(sorted(TYPES)),
    st.lists(st.tuples(st.sampled_from(TEMPLATES), JSON), min_size=1, max_size=12),
)
@example("timestamp_ntz", [(TEMPLATES[0], '"2026-01-31"')])
def test_any_values_are_read_as_they_are_judged(
    judged: Conn, type_: str, members: list[tuple[str, str]]
) -> None:
    check_same(judged, type_, [template.replace("%s", each) for template, each in members])
