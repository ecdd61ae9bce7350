"""Optional features of the schema, each a folder of `sql/`.

Of all other files only `hooks.sql` refers to them: each call is preceded by its file's name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from spark_pgqueue import nearest
from spark_pgqueue.postgres.errors import PgQueueError

FEATURES = ("schedules", "capture", "archive", "table_sink", "typed")

_MADE = re.compile(
    r"^create (?:or replace )?(?P<kind>function|procedure|table|type)(?: if not exists)?"
    r" (?P<name>_?pgqueue\.\w+)|^ *create (?P<type>type) (?P<type_name>pgqueue\.\w+)"
    r"|make_view\('(?P<view>\w+)'",
    re.MULTILINE,
)
_IN_USE = re.compile(r"^-- in use: (.+)\n((?:--     .+\n)*)", re.MULTILINE)
_HOOK = re.compile(r"^( *)-- on \w+\n(?:.*\n)*?\1-- end\n", re.MULTILINE)

_REMOVAL = """
do $removal$
declare
    v_ours   text[] := '{{{names}}}';
    v_tables text[] := '{{{tables}}}';
    v_used   text;
    v_drop   text;
begin
    -- (an older version may have some of the tables: the query answers for those, or fails)
    if v_tables = '{{}}'
       or exists (select from unnest(v_tables) t where to_regclass(t) is not null) then
        select string_agg(u, ', ') into v_used from ({in_use}) u (u);
    end if;
    if v_used is not null then
        raise exception 'a schema without {feature} has no place for: %', v_used
            using errcode = 'PQ006',
                  hint = 'Drop that first, or install with {feature}. Nothing was changed.';
    end if;
    select string_agg(format('drop %s %s', o.kind, o.names), '; ' order by o.n) into v_drop
    from (select 1, 'view', string_agg(oid::regclass::text, ', ') from pg_class
          where relkind = 'v' and relnamespace = 'pgqueue'::regnamespace
            and 'pgqueue.' || relname = any (v_ours)
          union all
          select 2, 'routine', string_agg(p.oid::regprocedure::text, ', ')
          from pg_proc p join pg_namespace n on n.oid = p.pronamespace
          where format('%s.%s', n.nspname, p.proname) = any (v_ours)
          union all
          -- lock: table
          select 3, 'table', string_agg(oid::regclass::text, ', ') from pg_class
          where relkind = 'r' and relnamespace = 'pgqueue'::regnamespace
            and 'pgqueue.' || relname = any (v_ours)
          union all
          select 4, 'type', string_agg(t.oid::regtype::text, ', ')
          from pg_type t join pg_class c on c.oid = t.typrelid and c.relkind = 'c'
          where t.typnamespace = 'pgqueue'::regnamespace
            and 'pgqueue.' || t.typname = any (v_ours)) o (n, kind, names)
    where o.names is not null;
    if v_drop is not null then
        execute v_drop;
    end if;
end $removal$;
"""


def known(without: Collection[str]) -> frozenset[str]:
    """The names of features, checked.

    Raises:
        PgQueueError: an unknown feature, or not a list of names.
    """
    if isinstance(without, str):
        raise PgQueueError(
            f"without must be a list of names of features, not the text {without!r}",
            hint=f"available: {', '.join(FEATURES)}",
        )
    for name in without:
        if name not in FEATURES:
            raise PgQueueError(
                f"without names {name!r}, which is not an optional feature",
                hint=nearest.hint(name, FEATURES),
            )
    return frozenset(without)


def removal(feature: str, texts: Iterable[str]) -> str:
    """SQL that runs instead of a feature's files: removes the feature if it is not in use.

    Args:
        feature: its name.
        texts: its files. The query after `-- in use:` in one of them finds what uses it.
    """
    text = "\n".join(texts)
    names, tables = set[str](), set[str]()
    for found in _MADE.finditer(text):
        name = found["name"] or found["type_name"] or f"pgqueue.{found['view']}"
        names.add(name)
        tables |= {name} if found["kind"] == "table" else set()
    (used,) = (
        first + "".join(f"\n{line.removeprefix('--')}" for line in more.splitlines())
        for first, more in _IN_USE.findall(text)
    )
    return _REMOVAL.format(
        feature=feature,
        names=", ".join(sorted(names)),
        tables=", ".join(sorted(tables)),
        in_use=used,
    )


def hooks_without(text: str, without: Collection[str]) -> str:
    """`hooks.sql` without the calls of some features."""

    def kept(hook: re.Match[str]) -> str:
        lines, keeps = list[str](), True
        for line in hook[0].splitlines():
            if file := re.match(r" *-- (\w+)/[\w/]+\.sql$", line):
                keeps = file[1] not in without
            if keeps or re.match(r" *-- end$", line):
                lines.append(line)
        return "\n".join(lines) + "\n"

    return _HOOK.sub(kept, text)
