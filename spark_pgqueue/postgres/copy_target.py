"""The table that a session copies its messages into."""

from __future__ import annotations

from typing import LiteralString

COPY_TARGET: LiteralString = (
    "case when pg_catalog.has_table_privilege('pgqueue.messages', 'insert')"
    " then 'messages' else 'written' end"
)
"""An expression in SQL: the table's name in the schema pgqueue.

Rows of `written` go to `messages` too, and Postgres checks the number of each on the way
(`sql/queue/send/written.sql`). A session that may insert into `messages`, as the owner's may, could
write any number anyway, and saves that.
"""
