"""The Spark queries: they publish the flights, aggregate them, and route them by topic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from spark_pgqueue.command_line.demo.flights import Days

FLIGHT = (
    "carrier string, tailnum string, scheduled timestamp,"
    " dep_time int, dep_delay int, arr_delay int"
)
BADLY_DELAYED = "dep_delay > 120 or arr_delay > 120"


def publisher(spark: SparkSession, url: str, files: Path, checkpoint: Path) -> StreamingQuery:
    """Publish the flights of the files, with the aircraft as key, and end."""
    flights = (
        spark.readStream.schema(spark.read.parquet(str(files)).schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(files))
        .withColumn("scheduled", F.expr("timestampadd(minute, minute, time_hour)"))
    )
    return (
        flights.select(F.col("tailnum").alias("key"), F.to_json(F.struct("*")).alias("data"))
        .writeStream.format("pgqueue")
        .option("url", url)
        .option("stream", "flights")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def daily(spark: SparkSession, url: str, checkpoint: Path, days: Days) -> StreamingQuery:
    """Store the number of flights and the delays of each day and airline in `days`."""
    # A day in New York begins at 5:00 UTC. (In summer at 4:00, but there are no flights then.)
    day = F.window("scheduled", "1 day", startTime="5 hours")
    totals = (
        read_flights(spark, url, "daily")
        .withWatermark("scheduled", "1 day")
        .groupBy(day.alias("day"), "carrier")
        .agg(
            F.count("*").alias("flights"),
            F.count("dep_time").alias("departures"),
            F.sum("dep_delay").alias("minutes"),
        )
        .select(F.date_format("day.start", "yyyy-MM-dd").alias("day"), "*")
    )

    def keep(changed: DataFrame, batch_id: int) -> None:
        for row in changed.collect():
            days[row[0], row.carrier] = (row.flights, row.departures, row.minutes)

    return (
        totals.writeStream.outputMode("update")
        .foreachBatch(in_short(keep))
        .option("checkpointLocation", str(checkpoint))
        .start()
    )


def in_short(function: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """The function, for foreachBatch, with short errors instead of Spark's own.

    When a query is stopped while its function runs, Spark searches the text of the error with a
    regular expression that recurses for each character. The text of a Py4JJavaError has the whole
    stack of the JVM, so the query's thread would end with a StackOverflowError on standard error.
    """

    def called(batch: DataFrame, batch_id: int) -> None:
        try:
            function(batch, batch_id)
        except Exception as error:
            why = str(error).split("\n\tat ")[0]
            raise RuntimeError(f"{type(error).__name__}: {why[:500]}") from None

    return called


def router(spark: SparkSession, url: str, checkpoint: Path) -> StreamingQuery:
    """Send delayed and cancelled flights to the stream notices, ordered by aircraft.

    The key of a notice is its topic and the aircraft: delayed.N14228, cancelled.N711MQ.
    """
    topic = F.when(F.col("dep_time").isNull(), "cancelled")
    topic = topic.when(F.expr(BADLY_DELAYED), "delayed")
    return (
        read_flights(spark, url, "router")
        .withColumn("topic", topic)
        .where("topic is not null")
        .select(F.expr("topic || '.' || coalesce(key, 'unknown')").alias("key"), "data")
        .writeStream.format("pgqueue")
        .option("url", url)
        .option("stream", "notices")
        .option("checkpointLocation", str(checkpoint))
        .start()
    )


def read_flights(spark: SparkSession, url: str, consumer: str) -> DataFrame:
    """The flights that a consumer receives."""
    return (
        spark.readStream.format("pgqueue")
        .option("url", url)
        .option("stream", "flights")
        .option("consumer", consumer)
        .option("includeHeaders", "false")
        .option("maxMessagesPerTrigger", 100_000)
        .load()
        .select("key", "data", F.from_json("data", FLIGHT).alias("flight"))
        .select("key", "data", "flight.*")
    )
