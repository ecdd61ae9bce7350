"""Settings of a role or database that change what SQL or its results mean, each at an odd value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value", str, str | int)

SETTINGS = {
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
    "escape_string_warning": "off",
    "backslash_quote": "on",
    "quote_all_identifiers": "on",
    "transform_null_equals": "on",
    "plpgsql.variable_conflict": "use_column",
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-1",
    "xmlbinary": "hex",
    "check_function_bodies": "off",
    "search_path": "public, pg_catalog",
    "TimeZone": "Asia/Jakarta",
}
"""By name. A role that has them gets the same answers from the queue as any other role. (A time in
that zone is written as one that cannot be read, with that DateStyle.) Not here: array_nulls, which
the client refuses; and the isolation of transactions, which claims refuse (PQ007)."""

REFUSED = {19: ("standard_conforming_strings", "escape_string_warning")}
"""What a major version of Postgres and later ones refuse."""


DATABASES = {
    "LATIN1": "encoding 'LATIN1' locale 'C'",
    "WIN1252": "encoding 'WIN1252' locale 'C'",
    "EUC_JP": "encoding 'EUC_JP' locale 'C'",
    "SQL_ASCII": "encoding 'SQL_ASCII' locale 'C'",
    "Turkish": "encoding 'UTF8' locale_provider icu icu_locale 'tr' locale 'C.UTF-8'",
}
"""Options of databases in which text is stored, compared or changed in another way."""


def accepted(settings: Mapping[str, Value], version: int) -> dict[str, Value]:
    """Those settings that a major version of Postgres accepts."""
    refused = {name for since, names in REFUSED.items() if version >= since for name in names}
    return {name: value for name, value in settings.items() if name not in refused}
