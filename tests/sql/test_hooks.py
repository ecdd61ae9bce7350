"""Hooks: nothing else names an optional feature, and what was dropped leaves no row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from spark_pgqueue.postgres import schema
from tests.measure import functions
from tests.sql.queue import Conn, maintain, one, rows, value

OPTIONAL = {
    "schedules": "schedules/",
    "capture": "capture/",
    "archive": "archive/",
    "tables as sinks": "table_sink/",
    "typed payloads": "typed/",
    "pgmq": "pgmq/",
}
"""What is optional, with its folder."""

LISTS = {
    "hooks.sql": "written from lines of the features' files",
    "comments.sql": "written from the headers of all functions",
    "view_comments.sql": "a sentence for each view and column",
    "access.sql": "who may call which function: one list, for one look at it",
    "roles.sql": "what others have no right to, of all that there is; pgmq is installed alone",
    "schema.sql": "what was there before an installation, also of pgmq, which is installed alone",
}
"""Files that may name features, and why: none is a floor."""

OTHER_WORDS = {
    "schema_path": "a column of streams: by it a send asks whether there is a schema, for nothing"
}
"""Names of features' functions that are something else, too."""

MADE = re.compile(
    r"create (?:or replace )?(?:function|procedure|table|type|sequence)(?: if not exists)?"
    r" ((?:_?pgqueue|pgmq)\.\w+)"
)
VIEW = re.compile(r"make_view\('(\w+)'")

OF = """
select c.relname::text as name,
       array(select a.attname::text from pg_attribute a
             where a.attrelid = c.oid and a.attname in ('stream_id', 'consumer_id')
             order by 1) as ids,
       array(select array[quote_ident(a.attname), format_type(a.atttypid, null)]
             from pg_attribute a
             where a.attrelid = c.oid and a.attnum > 0 and a.attnotnull and not a.atthasdef
               and a.attidentity = '' and a.attname not in ('stream_id', 'consumer_id')) as others
from pg_class c
where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and not c.relispartition
  and c.relname not in ('streams', 'consumers', 'dropped_streams')
  and exists (select from pg_attribute a
              where a.attrelid = c.oid and a.attname in ('stream_id', 'consumer_id'))
order by 1"""
"""The tables that have something of a stream or a consumer, and what a row of theirs needs."""

MADE_UP = {  # by column, or by type
    "state": "'ready'",
    "text": "'t{n}'",
    "text[]": "'{{}}'",
    "integer": "{n}",
    "bigint": "{n}",
    "bigint[]": "'{{}}'",
    "boolean": "false",
    "interval": "'1 day'",
    "int8multirange": "'{{[{n},{n}]}}'",
    "jsonb": "'[]'",
    "regclass": "'pg_class'",
    "timestamp with time zone": "now()",
    "uuid": "gen_random_uuid()",
    "xid8": "pg_current_xact_id()",
}

STAY = {
    "archive_attempts": "files, which an exporter deletes",
    "sink_streams": "by which a query notices that another stream has the name",
}


def left(conn: Conn) -> tuple[set[str], set[str]]:
    """The tables that keep something of a dropped consumer, and of a dropped stream.

    Each has a row of these before, and one of another consumer, and one of another stream, which
    stay.
    """
    streams = [value(conn, "create_stream", name) for name in ("dropped", "other")]
    ids = [
        (stream, value(conn, "create_consumer", name, c))
        for stream, name, c in zip(
            [streams[0], *streams], ["dropped", "dropped", "other"], "abc", strict=True
        )
    ]
    tables = rows(conn, OF)
    for table in tables:
        for n, (stream_id, consumer_id) in enumerate(ids, 1):
            given = {"stream_id": stream_id, "consumer_id": consumer_id}
            given = {name: given[name] for name in table.ids}
            for name, type_ in table.others:
                given[name] = MADE_UP.get(name, MADE_UP[type_]).format(n=n)
            conn.execute(
                f"insert into pgqueue.{table.name} ({', '.join(given)})"
                f" values ({', '.join(map(str, given.values()))}) on conflict do nothing".encode()
            )

    def having(column: str, value: int) -> set[str]:
        query = f"select exists (select from pgqueue.{{}} where {column} = {value})"
        return {t.name for t in tables if column in t.ids and one(conn, query.format(t.name))}

    def all_of(column: str) -> set[str]:
        return {t.name for t in tables if column in t.ids}

    assert all(having("consumer_id", c) == all_of("consumer_id") for _, c in ids)
    assert all(having("stream_id", s) == all_of("stream_id") for s in streams)
    others = having("stream_id", streams[1]), having("consumer_id", ids[2][1])
    value(conn, "drop_consumer", "dropped", "a")
    value(conn, "drop_stream", "dropped")
    assert others == (having("stream_id", streams[1]), having("consumer_id", ids[2][1]))
    maintain(conn)
    dropped = having("consumer_id", ids[0][1]), having("stream_id", streams[0])
    return dropped[0] | having("consumer_id", ids[1][1]), dropped[1]


def code() -> dict[str, str]:
    """The files of `sql/`, without comments."""
    folder = schema.sql_directory()
    files = [*schema.sql_files(), *schema.sql_files(schema.PGMQ)]
    return {str(file.relative_to(folder)): functions.code(file.read_text()) for file in files}


def naming(files: dict[str, str], among: Iterable[str]) -> Iterator[str]:
    """Where one of these files names a table or function of an optional feature not its own.

    Also as a word, in a text that is executed, if the word is no plain one.
    """
    for feature, own in OPTIONAL.items():
        theirs = {file for file in files if file.startswith(own)}
        names = {name for file in theirs for name in MADE.findall(files[file])}
        names |= {f"pgqueue.{name}" for file in theirs for name in VIEW.findall(files[file])}
        assert names, feature
        words = {bare for name in names if "_" in (bare := name.partition(".")[2].strip("_"))}
        words = {"pgmq"} if feature == "pgmq" else words - OTHER_WORDS.keys()
        pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names | words)))})\b")
        for file in set(among) - theirs:
            if not file.startswith("pgmq/"):
                for name in sorted(set(pattern.findall(files[file]))):
                    yield f"{file} names {name} of {feature}"


def test_what_is_optional_is_named_by_its_own_files_and_hooks_alone() -> None:
    files = code()
    found = list(naming(files, files))
    wrong = sorted(line for line in found if line.split()[0] not in LISTS)
    assert not wrong, "\n".join(wrong)
    assert {line.split()[0] for line in found} == LISTS.keys()


NAMING = [
    "perform _pgqueue.run_schedules(p_stream_id);",
    "execute format('select _pgqueue.%I($1)', 'run_schedules');",
    "select from pgqueue.captured;",
    "delete from pgqueue.archive_attempts;",
    "select * from pgqueue.stream_archives;",
    "insert into pgqueue.table_writes values (1);",
    "perform _pgqueue.refuse_misfit(p_stream, null);",
    "execute 'select pgmq._grant()';",
]


def test_a_floor_that_names_a_feature_is_found() -> None:
    files, floor = code(), "queue/claim/claims.sql"
    for line in NAMING:
        naming_it = naming(files | {floor: files[floor] + line}, [floor])
        assert [name.split()[0] for name in naming_it] == [floor], line


def test_what_is_dropped_leaves_no_row_in_any_table(conn: Conn) -> None:
    of_consumers, of_streams = left(conn)
    assert of_consumers == set()
    assert of_streams == STAY.keys()


def test_a_feature_that_forgets_what_is_dropped_is_found(conn: Conn) -> None:
    conn.execute("create table pgqueue.forgetful (consumer_id int not null, stream_id int)")
    of_consumers, of_streams = left(conn)
    assert of_consumers == {"forgetful"}
    assert of_streams == {"forgetful", *STAY}
