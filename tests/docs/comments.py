"""The comments of functions, for `psql`'s \\df+: `sql/comments.sql`, from the headers of functions.

A comment is the first sentence of a header, and there is no other source for it.
"""

from __future__ import annotations

import re
import textwrap

from spark_pgqueue.postgres import schema
from tests.docs.headers import Header, headers_in
from tests.docs.sql import SQL

FILE = SQL / "comments.sql"

_WIDTH = 120
"""Columns of a line of SQL."""

_TOP = """\
-- A sentence for each function that people call, for psql's \\df+. Written by make docs, from
-- the first sentence of each function's header: change it there. view_comments.sql has those of
-- views and of their columns.

comment on schema pgqueue is
    'A message queue and stream: see the comments of its functions and views.';

do $$
declare
    v_name text;
    v_text text;
begin
    -- each function that is installed: a schema may be without a feature
    for v_name, v_text in
        select p.proname, regexp_replace(m[2], '\\s+', ' ', 'g')
        from regexp_matches($text$
"""

_END = """
$text$, '^(\\w+): (.*(?:\\n .*)*)$', 'gn') m
        join pg_proc p on p.proname = m[1] and p.pronamespace = 'pgqueue'::regnamespace
    loop
        execute format('comment on routine pgqueue.%I is %L', v_name, v_text);
    end loop;
end $$;
"""


def file() -> str:
    """The file: the functions of each file of the SQL, in the order of installation."""
    headers = headers_in(SQL)
    rows = [
        _row(function, first_sentence(header))
        for path in schema.sql_files()
        for function, header in headers.items()
        if header.file == str(path.relative_to(SQL))
    ]
    return _TOP + "\n".join(rows) + _END


def first_sentence(header: Header) -> str:
    """What a function does, in one sentence."""
    text = header.about[0]
    assert isinstance(text, str), header
    found = re.match(r".*?\.(?=\s+[A-Z(\[]|\s*$)", text)
    return found[0] if found else text


def _row(function: str, text: str) -> str:
    return textwrap.fill(
        f"{function}: {text}",
        _WIDTH,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
