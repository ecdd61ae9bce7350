"""The options of the Spark source and sink: one table of each, and the checks.

Spark passes options as strings under lower-cased names. Messages show them as they are documented,
in camelCase, and never show the value of `url`, which may hold a password.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import conninfo


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: as documented, in camelCase.
        parse: turns the given text into the value; raises ValueError when it cannot.
        allowed: what may be given, in words.
        default: the value when it is not given.
        help: what it does.
        required: whether it must be given.
    """

    name: str
    parse: Callable[[str], Any]
    allowed: str
    default: Any
    help: str
    required: bool = False


@dataclass(frozen=True)
class SourceOptions:
    """The source's options, parsed. The fields are those of `SOURCE_OPTIONS`."""

    url: str | None = field(repr=False)  # it may hold a password
    stream: str
    consumer: str
    max_messages_per_trigger: int | None
    min_partitions: int | None
    max_records_per_partition: int | None
    visibility_timeout: timedelta | None
    wait_time: timedelta
    fail_on_data_loss: bool
    include_headers: bool
    create_consumer: bool
    starting_position: str | None
    ordering: str | None
    share_consumer: bool
    retry_timeout: timedelta


@dataclass(frozen=True)
class SinkOptions:
    """The sink's options, parsed. The fields are those of `SINK_OPTIONS`."""

    url: str | None = field(repr=False)  # it may hold a password
    stream: str
    consumers: tuple[str, ...] | None
    txn_app_id: str | None
    txn_version: int | None
    retry_timeout: timedelta


def parse_source(given: Mapping[str, str]) -> SourceOptions:
    """Check and convert the options of `readStream`.

    Raises:
        PgQueueError: an option is unknown, missing or malformed, or two do not fit together.
    """
    options = SourceOptions(**_parse(given, SOURCE_OPTIONS, "source"))
    if not options.create_consumer:
        for name, value in (
            ("startingPosition", options.starting_position),
            ("ordering", options.ordering),
        ):
            if value is not None:
                raise PgQueueError(
                    f"option {name} has no effect without createConsumer",
                    hint="it is fixed when the consumer is created: add "
                    f'option("createConsumer", "true"), or remove {name}',
                )
    return options


def parse_sink(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check and convert the options of `writeStream` (streaming) or `write`.

    Raises:
        PgQueueError: an option is unknown, missing or malformed, or two do not fit together.
    """
    options = SinkOptions(**_parse(given, SINK_OPTIONS, "sink"))
    if (options.txn_app_id is None) != (options.txn_version is None):
        raise PgQueueError(
            "options txnAppId and txnVersion must be given together",
            hint="txnAppId names the writing application, txnVersion numbers its writes",
        )
    if streaming and options.txn_app_id is not None:
        raise PgQueueError(
            "options txnAppId and txnVersion are for batch writes (df.write)",
            hint="remove them: a stream write is exactly-once by its query id and batch id",
        )
    return options


def duration(text: str) -> timedelta:
    """A positive duration such as '30s', '500 ms', '5 minutes' or '1 hour 30 minutes'.

    Raises:
        ValueError: it is not one.
    """
    text = re.sub(r"^interval\s+", "", text.strip().lower())
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-zµ]+)", text)
    if not parts or re.sub(r"\d+(?:\.\d+)?\s*[a-zµ]+[\s,]*", "", text):
        raise ValueError
    try:
        value = sum((float(n) * _UNITS[unit] for n, unit in parts), timedelta())
    except (KeyError, OverflowError):
        raise ValueError from None
    if value <= timedelta():
        raise ValueError
    return value


_UNITS = {
    name: unit
    for names, unit in (
        ("ms msec millisecond milliseconds", timedelta(milliseconds=1)),
        ("s sec secs second seconds", timedelta(seconds=1)),
        ("m min mins minute minutes", timedelta(minutes=1)),
        ("h hr hrs hour hours", timedelta(hours=1)),
        ("d day days", timedelta(days=1)),
    )
    for name in names.split()
}


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value < 2**63:
        raise ValueError
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise ValueError
    return value


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value not in ("true", "false"):
        raise ValueError
    return value == "true"


def _name(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(name).strip() for name in text.split(","))


def _ordering(text: str) -> str:
    if text.strip().lower() not in ("none", "key", "stream"):
        raise ValueError
    return text.strip().lower()


def _position(text: str) -> str:
    position = text.strip()
    if position.lower() in ("earliest", "latest"):
        return position.lower()
    if datetime.fromisoformat(position).tzinfo is None:
        raise ValueError
    return position


_NUMBER = "a whole number of at least 1"
_DURATION = "a duration longer than 0 with a unit, such as '500ms', '30s' or '5 minutes'"
_BOOLEAN = "true or false"

_URL = Option(
    "url",
    str,
    "a libpq URI (postgresql://user@host:5432/dbname) or conninfo string (host=... dbname=...)",
    None,
    "The database. Without it, libpq's environment (PGHOST, PGSERVICE, ...), service files and "
    "password file decide.",
)

_RETRY_TIMEOUT = Option(
    "retryTimeout",
    duration,
    _DURATION,
    timedelta(minutes=5),
    "How long driver and executors go on trying to reach Postgres before the query fails.",
)

SOURCE_OPTIONS = (
    _URL,
    Option("stream", _name, "a stream's name", None, "The stream to read.", required=True),
    Option(
        "consumer",
        _name,
        "a consumer's name",
        None,
        "The consumer whose messages the query claims and acknowledges.",
        required=True,
    ),
    Option(
        "maxMessagesPerTrigger",
        _positive,
        _NUMBER,
        None,
        "Claim at most so many messages in a micro-batch. By default all that are available.",
    ),
    Option(
        "minPartitions",
        _positive,
        _NUMBER,
        None,
        "Read a micro-batch in at least so many partitions (but never more than messages). By "
        "default by its size.",
    ),
    Option(
        "maxRecordsPerPartition",
        _positive,
        _NUMBER,
        None,
        "Read at most so many messages in one partition. With ordering by key the messages of one "
        "key stay together even so.",
    ),
    Option(
        "visibilityTimeout",
        duration,
        _DURATION,
        None,
        "After how long without a sign of life other claimers may take over what the query has "
        "claimed. Renewed every third of it. By default the consumer's.",
    ),
    Option(
        "waitTime",
        duration,
        _DURATION,
        timedelta(seconds=1),
        "How long to wait for messages before Spark is told that there are none.",
    ),
    Option(
        "failOnDataLoss",
        _boolean,
        _BOOLEAN,
        True,
        "Fail when claimed messages were deleted before they could be read; false logs a warning.",
    ),
    Option("includeHeaders", _boolean, _BOOLEAN, True, "Whether there is a column headers."),
    Option(
        "createConsumer",
        _boolean,
        _BOOLEAN,
        False,
        "Create the consumer when the query starts and there is none. The role needs the rights of "
        "an admin for that.",
    ),
    Option(
        "startingPosition",
        _position,
        "earliest, latest, or a timestamp with time zone such as 2026-01-31T12:00:00Z",
        None,
        "Where a consumer made by createConsumer starts. By default latest.",
    ),
    Option(
        "ordering",
        _ordering,
        "none, key or stream",
        None,
        "The ordering of a consumer made by createConsumer. By default none.",
    ),
    Option(
        "shareConsumer",
        _boolean,
        _BOOLEAN,
        False,
        "Whether other queries of the application may read the consumer too, if they say so as "
        "well: each then gets a part of the messages.",
    ),
    _RETRY_TIMEOUT,
)

SINK_OPTIONS = (
    _URL,
    Option("stream", _name, "a stream's name", None, "The stream to write.", required=True),
    Option(
        "consumers",
        _names,
        "names of consumers of the stream, with commas between them",
        None,
        "Publish to these consumers alone. By default to all.",
    ),
    Option(
        "txnAppId",
        _name,
        "a name",
        None,
        "Batch writes only: the writes of a txnAppId are published once by their txnVersion. One "
        "with the last published version or a lower one writes nothing, and logs a warning.",
    ),
    Option("txnVersion", _not_negative, "a whole number of at least 0", None, "See txnAppId."),
    _RETRY_TIMEOUT,
)

# What the user calls the arguments of SQL functions.
SOURCE_NAMES = {
    "p_stream": "option stream",
    "p_consumer": "option consumer",
    "p_name": "option consumer",
    "p_start": "option startingPosition",
    "p_ordering": "option ordering",
    "p_visibility_timeout": "option visibilityTimeout",
    "p_max": "option maxMessagesPerTrigger",
}
SINK_NAMES = {
    "p_stream": "option stream",
    "p_consumers": "option consumers",
    "p_sink": "option txnAppId",
    "p_batch": "option txnVersion",
    "p_priority": "column priority",
    "p_deliver_at": "column deliver_at",
    "p_key": "column key",
    "p_headers": "column headers",
    "p_data": "column data",
    "p_dedup_key": "column dedup_key",
}

# What Spark itself puts among the options of a sink.
_SPARK_SINK_OPTIONS = {"checkpointlocation", "queryname"}

# Names that other connectors have for what is another option, or no option, here.
_FOREIGN = {
    "dsn": "use url: Spark hides its value in explain() and logs",
    "uri": "use url",
    "dbtable": "use stream",
    "path": "use stream: load, save and start take no path here",
    "user": "put the user into url, or set PGUSER",
    "password": "put the password into url (Spark hides it), or use ~/.pgpass or PGPASSWORD",
    "numpartitions": "use minPartitions, when reading",
    "maxfilespertrigger": "use maxMessagesPerTrigger, when reading",
    "maxbytespertrigger": "use maxMessagesPerTrigger, when reading",
    # Kafka's
    "kafka.bootstrap.servers": "use url: the database, postgresql://user@host:5432/dbname",
    "topic": "use stream",
    "subscribe": "use stream for what is read, and consumer for who reads it",
    "subscribepattern": "use stream: a query reads one, and a union of queries reads several",
    "assign": "use stream, and consumer for who reads it",
    "kafka.group.id": "use consumer",
    "groupidprefix": "use consumer",
    "startingoffsets": "use startingPosition with createConsumer, when reading: "
    "earliest, latest or a time",
    "startingtimestamp": "use startingPosition with createConsumer, when reading",
    "startingoffsetsbytimestamp": "use startingPosition with createConsumer, when reading",
    "endingoffsets": "use trigger(availableNow=True): it reads what is there when it starts",
    "endingtimestamp": "use trigger(availableNow=True): it reads what is there when it starts",
    "maxoffsetspertrigger": "use maxMessagesPerTrigger, when reading",
    "minoffsetspertrigger": "leave it out: a micro-batch takes what is there",
    "maxtriggerdelay": "leave it out: a micro-batch takes what is there",
}
_KAFKA = "leave it out: what Postgres needs to connect goes into url"


def _parse(given: Mapping[str, str], table: tuple[Option, ...], side: str) -> dict[str, Any]:
    known = {option.name.lower(): option for option in table}
    for name in given:
        if name.lower() not in known and not (
            side == "sink" and name.lower() in _SPARK_SINK_OPTIONS
        ):
            raise _unknown(name, known, side)
    lowered = {name.lower(): value for name, value in given.items()}
    values = {_field(o.name): _value(o, lowered.get(o.name.lower())) for o in table}
    conninfo(values["url"])
    return values


def _value(option: Option, text: str | None) -> Any:
    if text is None:
        if option.required:
            raise PgQueueError(
                f"option {option.name} is missing",
                hint=f'add option("{option.name}", ...): {option.allowed}',
            )
        return option.default
    try:
        return option.parse(text)
    except ValueError:
        raise PgQueueError(
            f"option {option.name} is {text!r}, and must be {option.allowed}",
        ) from None


def _unknown(name: str, known: dict[str, Option], side: str) -> PgQueueError:
    names = ", ".join(option.name for option in known.values())
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {known[near[0]].name}?" if near else f"its options are: {names}"
    if name.lower().startswith("kafka."):
        hint = _KAFKA
    return PgQueueError(
        f"the pgqueue {side} has no option {name}", hint=_FOREIGN.get(name.lower(), hint)
    )


def _field(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
