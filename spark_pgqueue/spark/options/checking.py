"""What an option is, and the checks that all of them have in common."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import with_credentials
from spark_pgqueue.spark.options.foreign import CATALOG, FOREIGN, KAFKA
from spark_pgqueue.spark.options.values import (
    BOOLEAN,
    DURATION,
    NUMBER,
    TYPES,
    a_name,
    boolean,
    duration,
    positive,
)

STREAMING, BATCH = "streaming queries", "batches"
"""Where an option may be alone."""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: as documented, in camelCase.
        parse: turns the given text into the value; raises ValueError when it cannot.
        allowed: what may be given, in words.
        default: the value when it is not given.
        help: what it does, for the pages and as the hint of an error. Where `default` is None, its
            last sentence says what is done then: "By default ...".
        required: whether it must be given.
        is_secret: whether no error may show its value.
        needs: the options without which it is refused.
        excludes: the options beside which it is refused; said of one of them, it holds for both.
        only: STREAMING or BATCH where it is refused elsewhere.
    """

    name: str
    parse: Callable[[str], Any]
    allowed: str
    default: Any
    help: str
    required: bool = False
    is_secret: bool = False
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    only: str = ""

    @property
    def type(self) -> str:
        """The type of its value, in a word."""
        return TYPES.get(self.parse, "string")


URL = Option(
    "url",
    str,
    "a libpq URI (postgresql://user@host:5432/dbname) or conninfo string (host=... dbname=...)",
    None,
    "The database. Without it, libpq's environment (PGHOST, PGSERVICE, ...), service files and "
    "password file decide.",
)

CONNECTION = (
    URL,
    Option("user", a_name, "a role of the database", None, "The user, where url names none."),
    Option(
        "password",
        a_name,
        "a password that is not empty",
        None,
        "The password, where url has none. Spark hides it, as it does url, in explain() and logs.",
        is_secret=True,
        excludes=("passwordFile",),
    ),
    Option(
        "passwordFile",
        a_name,
        "a path of a file on the driver and the executors",
        None,
        "A file with nothing but the password, such as a mounted secret. It is read at each "
        "connection, so a new password needs no restart.",
    ),
)
"""How to connect."""

MIN_PARTITIONS = Option(
    "minPartitions",
    positive,
    NUMBER,
    None,
    "Read in at least so many partitions (but never more than messages). By default by size.",
)

MAX_RECORDS_PER_PARTITION = Option(
    "maxRecordsPerPartition",
    positive,
    NUMBER,
    None,
    "Read at most so many messages in one partition.",
)

INCLUDE_HEADERS = Option(
    "includeHeaders", boolean, BOOLEAN, True, "Whether there is a column headers."
)

MAX_CONNECTIONS = Option(
    "maxConnections",
    positive,
    NUMBER,
    None,
    "Read in at most so many partitions, each by one connection, which is closed at its end. It "
    "comes before maxRecordsPerPartition. At least minPartitions. By default any number.",
)

RETRY_TIMEOUT = Option(
    "retryTimeout",
    duration,
    DURATION,
    timedelta(minutes=5),
    "How long driver and executors go on trying to reach Postgres before the query fails.",
)

# What Spark itself puts among the options of a sink.
_SPARK_SINK_OPTIONS = {"checkpointlocation", "queryname"}


def parse(
    given: Mapping[str, str], table: tuple[Option, ...], side: str, others: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values of options by the names of fields, checked one by one.

    Args:
        given: the options.
        table: those that there are.
        side: what has them, for errors.
        others: names that there are on other sides, for who has misspelled one of them.

    Raises:
        PgQueueError: an option is unknown, missing or malformed.
    """
    known = {option.name.lower(): option for option in table}
    for name in given:
        if name.lower() not in known and not (
            side == "sink" and name.lower() in _SPARK_SINK_OPTIONS
        ):
            raise _unknown(name, known, side, others)
    lowered = {name.lower(): value for name, value in given.items()}
    values = {_field(o.name): _value(o, lowered.get(o.name.lower())) for o in table}
    how = [values.pop(_field(option.name)) for option in CONNECTION]
    return {"url": with_credentials(*how)} | values


def _value(option: Option, text: str | None) -> Any:
    if text is None:
        if option.required:
            raise PgQueueError(
                f"option {option.name} is missing",
                hint=f'add option("{option.name}", ...): {option.allowed}. {option.help}',
            )
        return option.default
    try:
        return option.parse(text)
    except ValueError:
        given = "not allowed" if option.is_secret else repr(text)
        raise PgQueueError(
            f"option {option.name} is {given}, and must be {option.allowed}", hint=option.help
        ) from None


def _unknown(
    name: str, known: dict[str, Option], side: str, others: tuple[str, ...]
) -> PgQueueError:
    names = {lowered: option.name for lowered, option in known.items()}
    names |= {other.lower(): other for other in others}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"its options are: {', '.join(names.values())}"
    if near:
        hint = f"did you mean {names[near[0]]}?"
    if name.lower().startswith("kafka."):
        hint = KAFKA
    if name.lower() == "provider" or name.lower().startswith("option."):  # of create table
        hint = CATALOG
    return PgQueueError(
        f"the pgqueue {side} has no option {name}", hint=FOREIGN.get(name.lower(), hint)
    )


def _field(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def check_partitions(min_partitions: int | None, max_connections: int | None) -> None:
    """Raise unless there may be as many partitions as there must be."""
    if min_partitions and max_connections and min_partitions > max_connections:
        raise PgQueueError(
            f"option minPartitions is {min_partitions}, and maxConnections {max_connections}: a "
            "partition is read by a connection",
            hint="lower minPartitions, and call repartition() on what was read for more tasks",
        )
