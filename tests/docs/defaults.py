"""The defaults that pages and docstrings state, from where the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.spark.options import checking
from spark_pgqueue.spark.options.values import shown
from spark_pgqueue.worker.options import Options

ROOT = Path(__file__).parents[2]

_ROW = r"^ +(?:values )?\('(?:consumer|stream)', +'(\w+)', +'\w+', +(?:'([^']*)'|null),"
SETTINGS = {
    name: default or "none"
    for name, default in re.findall(
        _ROW, (ROOT / "sql/base/settings.sql").read_text(), re.MULTILINE
    )
}
"""The default of each setting."""

_DELIVERIES, _TIMEOUT = SETTINGS["max_deliver_count"], SETTINGS["visibility_timeout"]
_CAP = SETTINGS["backoff_cap"].replace("1 hour", "an hour")
_SIZES = [f"{int(SETTINGS['max_bytes']) >> 20} MB", f"{int(SETTINGS['max_header_bytes']) >> 10} kB"]
_RETRY_TIMEOUT = shown(checking.RETRY_TIMEOUT.default)
_PREFETCH = [str(Options.prefetch), f"{Options.prefetch_bytes >> 20} MiB"]
_GRACE = f"{Options.grace.total_seconds():g} s"

STATED = [
    ("README.md", r"-- yours for (.+?), the visibility", [_TIMEOUT]),
    ("notebooks/1-first-steps.ipynb", r"visibility timeout\*\* \((.+?) by default\)", [_TIMEOUT]),
    ("notebooks/2-fan-out.ipynb", r"\"timeout \((.+?)\)", [_TIMEOUT]),
    ("sql/README.md", r"\| for ([^|]+); a worker without end", [f"{PATIENCE:g} s"]),
    ("sql/guide/first-hour.md", r"4 s, up to (.+?)\. After (\d+) deliveries", [_CAP, _DELIVERIES]),
    ("sql/guide/guarantees.md", r"after (\d+) deliveries", [_DELIVERIES]),
    ("sql/guide/guarantees.md", r"payload has (\d+ MB) at most, headers (\d+ kB)", _SIZES),
    ("sql/guide/operations.md", r"A client tries for (.+?),", [f"{PATIENCE:g} s"]),
    ("sql/guide/operations.md", r"`retryTimeout` \((.+?)\)", [_RETRY_TIMEOUT]),
    ("sql/guide/questions.md", r"timeout \(by default (.+?)\)", [_TIMEOUT]),
    ("sql/guide/questions.md", r"`visibilityTimeout` \((.+?)\)", [_TIMEOUT]),
    ("sql/guide/workers.md", r"after a stop, (\d+ s)", [_GRACE]),
    ("sql/guide/workers.md", r"ahead of their calls; by default (\d+) and (\d+ MiB)", _PREFETCH),
    ("sql/operate/stream_lifecycle.sql", r"268,435,456; (\d+ MB) by default", _SIZES[:1]),
    ("sql/operate/stream_lifecycle.sql", r"1,048,576; (\d+ kB) by default", _SIZES[1:]),
    ("spark_pgqueue/client/calls/managing_streams.py", r"(\d+ MB) by default", _SIZES[:1]),
    ("spark_pgqueue/client/calls/managing_streams.py", r"(\d+ kB) by default", _SIZES[1:]),
    ("spark_pgqueue/worker/consumer.py", r"messages ahead, (\d+) by default", _PREFETCH[:1]),
    ("spark_pgqueue/worker/consumer.py", r"bytes; (\d+ MiB) by default", _PREFETCH[1:]),
    ("spark_pgqueue/worker/consumer.py", r"after a stop; (\d+ s) by default", [_GRACE]),
]
"""A page or a docstring, the words in it that state defaults, and the defaults of the code."""

_TABLE = r"^\| (?:setting|of a consumer|of a stream) \| default \|.*\n(?:\|.*\n)+"
_CELLS = r"^(\| (`[^|]+) \|)[^|]*\|"

FILES = sorted(
    {file for file, *_ in STATED}
    | {str(page.relative_to(ROOT)) for page in (ROOT / "sql" / "guide").glob("*.md")}
)
"""The files that may state a default."""


def named(file: str) -> set[str]:
    """The settings that have a row in a table of a page."""
    tables = "".join(re.findall(_TABLE, (ROOT / file).read_text(), re.MULTILINE))
    cells = re.findall(_CELLS, tables, re.MULTILINE)
    return {name for _, names in cells for name in re.findall(r"\w+", names)}


def page(file: str) -> str:
    """The text of a file, with the defaults of the code.

    Raises:
        LookupError: the file lacks the words that `STATED` has, or names a setting that there is
            not.
    """
    text = re.sub(
        _TABLE,
        lambda table: re.sub(_CELLS, _with_defaults, table[0], flags=re.MULTILINE),
        (ROOT / file).read_text(),
        flags=re.MULTILINE,
    )
    for _, words, defaults in (each for each in STATED if each[0] == file):
        text = restated(file, text, words, defaults)
    return text


def restated(file: str, text: str, words: str, values: list[str]) -> str:
    """The text of a file, with values in the groups of a pattern.

    Raises:
        LookupError: the text lacks the words.
    """
    found = re.search(words.replace(" ", r"\s+"), text)
    if found is None:
        raise LookupError(f"{file} lacks {words!r}: see STATED in tests/docs")
    for n in reversed(range(len(values))):
        if " ".join(found[n + 1].split()) != values[n]:
            text = text[: found.start(n + 1)] + values[n] + text[found.end(n + 1) :]
    return text


def _with_defaults(row: re.Match[str]) -> str:
    names = re.findall(r"\w+", row[2])
    return f"{row[1]} {', '.join(SETTINGS[name] for name in names)} |"
