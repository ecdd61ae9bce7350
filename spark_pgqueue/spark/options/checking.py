"""The definition of an option, and the checks that all options have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

from spark_pgqueue import nearest
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import with_credentials
from spark_pgqueue.spark.options.values import (
    BOOLEAN,
    DURATION,
    NUMBER,
    TYPES,
    a_name,
    boolean,
    duration,
    positive,
    reading_mode,
    shown,
)

STREAMING, BATCH = "streaming queries", "batches"
"""The kinds of queries to which an option may be restricted."""


@dataclass(frozen=True)
class Option:
    """An option of the source, of the sink, or of the batch readers."""

    # turns the given text into the value; raises ValueError for a text that is not allowed
    parse: Callable[[str], Any]
    allowed: str  # the texts that are allowed, in words
    # what the option does, for the options page and as the hint of an error. Where `default` is
    # None, the last sentence says what happens without the option: "By default ...".
    # `options_of` replaces "{default}" by `default`
    help: str
    default: Any = None  # the value when the option is not given, and the only place that has it
    required: bool = False  # whether the option must be given
    is_secret: bool = False  # whether errors hide the value
    needs: tuple[str, ...] = ()  # the options without which this option is refused
    # the options with which this option is refused. Of two options that exclude each other, only
    # one names the other
    excludes: tuple[str, ...] = ()
    only: str = ""  # STREAMING or BATCH where the option is refused elsewhere
    name: str = ""  # as documented, in camelCase; `options_of` makes it from the name of the field

    @property
    def type(self) -> str:
        """The type of the value, in a word."""
        return TYPES.get(self.parse, "string")

    @property
    def field(self) -> str:
        """The name of the field that has the value."""
        return re.sub(r"([A-Z])", r"_\1", self.name).lower()


def option(parse: Callable[[str], Any], allowed: str, help: str, **more: Any) -> Any:
    """A field of a dataclass of options. Arguments as the attributes of `Option`."""
    return use(Option(parse, allowed, help, **more))


def use(shared: Option, **changed: Any) -> Any:
    """A field with an option that several dataclasses have, and what is different in this one."""
    return field(metadata={"option": replace(shared, **changed)})


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass, in the order of its fields."""
    found = [(each.name, each.metadata["option"]) for each in fields(cls) if each.metadata]
    return tuple(
        replace(
            option,
            name=re.sub("_(.)", lambda m: m[1].upper(), name),
            help=option.help.replace("{default}", shown(option.default)),
        )
        for name, option in found
    )


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The options of the connection, which `parse` combines into one url."""

    url: str | None = option(
        str,
        "a libpq URI (postgresql://user@host:5432/dbname) or conninfo string (host=... dbname=...)",
        "The database. Without url, libpq's environment (PGHOST, PGSERVICE, ...), service files "
        "and password file decide.",
    )
    user: str | None = option(a_name, "a role of the database", "The user, where url names none.")
    password: str | None = option(
        a_name,
        "a password that is not empty",
        "The password, where url has none. Spark hides it, as it hides url, in explain() and logs.",
        is_secret=True,
        excludes=("passwordFile",),
    )
    password_file: str | None = option(
        a_name,
        "a path of a file on the driver and the executors",
        "A file that holds the password and nothing else, such as a mounted secret. Each "
        "connection reads the file, so a new password needs no restart.",
    )


CONNECTION = options_of(Connection)


@dataclass(frozen=True, kw_only=True)
class Connecting:
    """The fields that all dataclasses of options have."""

    url: str | None = field(repr=False)  # it may hold a password
    given: frozenset[str]  # the names of the options that the user set


MIN_PARTITIONS = Option(
    positive,
    NUMBER,
    "Read in at least this many partitions, but never in more partitions than messages. By default "
    "by size.",
)
MAX_RECORDS_PER_PARTITION = Option(
    positive, NUMBER, "Read at most this many messages in one partition."
)
INCLUDE_HEADERS = Option(boolean, BOOLEAN, "Whether to include the column headers.", default=True)
TYPED = Option(
    reading_mode,
    "permissive or failfast",
    "Add a column value: the payload as the columns of the stream's schema. failfast: instead of "
    "data; a message that does not fit fails the query. permissive: in addition to data; value is "
    "null for a message that does not fit. By default there is no such column.",
)
MAX_CONNECTIONS = Option(
    positive,
    NUMBER,
    "Read in at most this many partitions. Each partition is read by a connection, which is "
    "closed at its end. maxConnections takes precedence over maxRecordsPerPartition, and must be "
    "at least minPartitions. By default any number.",
)
RETRY_TIMEOUT = Option(
    duration,
    DURATION,
    "How long driver and executors try to reach Postgres again before the query fails.",
    default=timedelta(minutes=5),
)

# Spark itself puts these among the options of a sink.
_SPARK_SINK_OPTIONS = {"checkpointlocation", "queryname"}


def parse(
    given: Mapping[str, str], table: tuple[Option, ...], side: str, others: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values of options by the names of their fields; each value is checked by itself.

    Args:
        given: the options that the user gave.
        table: the options that exist here.
        side: the side of Spark that has these options, for errors.
        others: names of options of other sides that a misspelled name may stand for.
    """
    known = {each.name.lower(): each for each in table}
    for name in given:
        if name.lower() not in known and not (
            side == "sink" and name.lower() in _SPARK_SINK_OPTIONS
        ):
            raise _unknown(name, known, side, others)
    lowered = {name.lower(): value for name, value in given.items()}
    values = {each.field: _value(each, lowered.get(each.name.lower())) for each in table}
    how = [values.pop(each.field) for each in CONNECTION]
    names = frozenset(each.name for each in table if each.name.lower() in lowered)
    return {"url": with_credentials(*how), "given": names} | values


def is_given(name: str, given: Mapping[str, str]) -> bool:
    """Whether a user gave an option; `name` is in lower case."""
    return any(each.lower() == name for each in given)


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
    except (ValueError, OverflowError, RecursionError):  # also a time, or a nesting, without limits
        said = "is not allowed: it" if option.is_secret else f"is {text!r}, but"
        raise PgQueueError(
            f"option {option.name} {said} must be {option.allowed}", hint=option.help
        ) from None


def _unknown(
    name: str, known: dict[str, Option], side: str, others: tuple[str, ...]
) -> PgQueueError:
    foreign = FOREIGN
    if name.lower().startswith("kafka."):
        foreign = {name: KAFKA} | FOREIGN
    if name.lower() == "provider" or name.lower().startswith("option."):  # of create table
        foreign = {name: CATALOG}
    names = [*(option.name for option in known.values()), *others]
    return PgQueueError(
        f"the pgqueue {side} has no option {name}", hint=nearest.option_hint(name, names, foreign)
    )


def check_partitions(min_partitions: int | None, max_connections: int | None) -> None:
    """Raise when minPartitions is more than maxConnections."""
    if min_partitions and max_connections and min_partitions > max_connections:
        raise PgQueueError(
            f"option minPartitions is {min_partitions}, and maxConnections {max_connections}: each "
            "partition needs a connection",
            hint="lower minPartitions, and call repartition() on the DataFrame for more tasks",
        )


FOREIGN = {
    "dsn": "use url: Spark hides its value in explain() and logs",
    "uri": "use url",
    "dbtable": "use stream; or table, when writing",
    **dict.fromkeys(
        ("host", "port", "database", "dbname"),
        "put it into url: postgresql://user@host:5432/dbname",
    ),
    "query": "use stream and table, and option where",
    **dict.fromkeys(("driver", "fetchsize", "batchsize"), "leave it out: JDBC is not used here"),
    "path": "use stream: load, save and start take no path here",
    "numpartitions": "use minPartitions, when reading",
    "maxconnections": "as many tasks write as the DataFrame has partitions: call coalesce() on it "
    "before, to write with fewer",
    "maxfilespertrigger": "use maxMessagesPerTrigger, when reading",
    # of spark.read
    "table": "it is for spark.read, which looks into a queue, and for writing",
    "columns": 'it goes with table, for spark.read: option("table", "pending")',
    "where": 'it goes with table, for spark.read: option("table", "pending")',
    # Kafka's
    "kafka.bootstrap.servers": "use url: the database, postgresql://user@host:5432/dbname",
    "bootstrap.servers": "use url: the database, postgresql://user@host:5432/dbname",
    **dict.fromkeys(
        ("group.id", "kafka.group.id", "groupidprefix"), "use consumer; or group, without one"
    ),
    "failondataloss": "it is for readStream",
    "includeheaders": "leave it out: a column has the headers",
    "subscribe": "use stream for what is read, or streams, and consumer for who claims it",
    "subscribepattern": "use streamPattern, without consumer",
    "assign": "use stream or streams; minPartitions for how many tasks read",
    "streams": "leave consumer out, when reading: a consumer is of one stream",
    "streampattern": "leave consumer out, when reading: a consumer is of one stream",
    "group": "it is for readStream without consumer: with one, Postgres knows how far it is",
    "startingoffsets": "use startingPosition with createConsumer, when reading: "
    "earliest, latest or a time; or leave consumer out",
    "startingtimestamp": "use startingPosition with createConsumer, when reading, or leave "
    "consumer out",
    "startingoffsetsbytimestamp": "use startingPosition with createConsumer, when reading; or, "
    "without consumer, startingTimestamp, or startingOffsets with a time for each stream",
    "startingoffsetsbytimestampstrategy": "leave it out: there is always a place for a time",
    "endingoffsets": "use trigger(availableNow=True): it reads what is there when it starts",
    "endingtimestamp": "use trigger(availableNow=True): it reads what is there when it starts",
    "endingoffsetsbytimestamp": "use endingTimestamp, or endingOffsets with a time for each "
    "stream, in a batch without consumer",
    "fetchoffset.numretries": "use retryTimeout",
    "fetchoffset.retryintervalms": "leave it out: see retryTimeout",
    "kafkaconsumer.polltimeoutms": "use retryTimeout",
    "maxoffsetspertrigger": "use maxMessagesPerTrigger, when reading",
    "minoffsetspertrigger": "use minMessagesPerTrigger, when reading",
}
KAFKA = "leave it out: what Postgres needs to connect goes into url"
CATALOG = (
    "a table of Spark's catalog keeps no options: in its place, create temporary view ... using "
    "pgqueue options (...)"
)
