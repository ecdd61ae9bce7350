"""The options of the Spark source and sink: a dataclass for each side, and the checks.

Spark passes options as strings under lower-cased names. Messages show them as they are documented,
in camelCase, and never show the value of `url`, which may hold a password.
"""

from spark_pgqueue.spark.options.checking import Option
from spark_pgqueue.spark.options.sink import SINK_NAMES, SINK_OPTIONS, SinkOptions, parse_sink
from spark_pgqueue.spark.options.source import (
    SOURCE_NAMES,
    SOURCE_OPTIONS,
    SourceOptions,
    parse_source,
)
from spark_pgqueue.spark.options.stream_source import (
    STREAM_SOURCE_NAMES,
    STREAM_SOURCE_OPTIONS,
    StreamSourceOptions,
    parse_stream_source,
)
from spark_pgqueue.spark.options.table import (
    CONSUMER_OF,
    TABLE_NAMES,
    TABLE_OPTIONS,
    TableOptions,
    as_pending,
    names_table,
    parse_table,
)
from spark_pgqueue.spark.options.values import ACTIONS, REVIVING, duration, size

__all__ = [
    "ACTIONS",
    "CONSUMER_OF",
    "REVIVING",
    "SINK_NAMES",
    "SINK_OPTIONS",
    "SOURCE_NAMES",
    "SOURCE_OPTIONS",
    "STREAM_SOURCE_NAMES",
    "STREAM_SOURCE_OPTIONS",
    "TABLE_NAMES",
    "TABLE_OPTIONS",
    "Option",
    "SinkOptions",
    "SourceOptions",
    "StreamSourceOptions",
    "TableOptions",
    "as_pending",
    "duration",
    "names_table",
    "parse_sink",
    "parse_source",
    "parse_stream_source",
    "parse_table",
    "size",
]
