"""The table that a session copies its messages into."""

from __future__ import annotations

from typing import LiteralString

COPY_TARGET: LiteralString = (
    "case when pg_catalog.has_table_privilege('pgqueue.messages', 'insert')"
    " then 'messages' else 'written' end"
)
"""An expression in SQL: the table's name in the schema pgqueue.

Rows written to `written` are inserted into `messages` after a check of their numbers
(`sql/queue/send/written.sql`). A session that may insert into `messages` directly, such as the
owner's, skips this check.
"""
