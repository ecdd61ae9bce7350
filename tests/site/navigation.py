"""Where each page is in the site: tutorials, how-to guides by reader, reference, explanation.

A test builds the site in strict mode: a page that is missing here, or is no more, fails it.
"""

from __future__ import annotations

SECTIONS = {
    "Tutorials": {
        "The first hour": "sql/guide/first-hour",
        "First questions": "sql/guide/questions",
        "Eight lessons in notebooks": "notebooks/README",
    },
    "How-to: applications": {
        "Recipes": "sql/guide/cookbook",
        "Send in your transaction": "sql/guide/in-your-transaction",
        "FastAPI, SQLAlchemy, Django": "sql/guide/frameworks",
        "Use Node, Java, Go, HTTP": "sql/guide/languages",
        "Move from pgmq, Kafka, SQS or Celery": "sql/guide/moving",
        "Serve clients of pgmq": "sql/guide/pgmq",
        "Run Celery": "sql/guide/celery",
        "Run workers": "sql/guide/workers",
        "Test your code": "sql/guide/testing",
        "Retry": "sql/guide/retries",
        "Handle dead letters": "sql/guide/dead-letters",
        "Send each message once": "sql/guide/sending-once",
        "Delay, defer and expire messages": "sql/guide/defer-and-expiry",
        "Start runs of Airflow": "sql/guide/airflow",
        "Send on a schedule": "sql/guide/schedules",
        "Set priorities": "sql/guide/priorities",
        "Cancel messages": "sql/guide/cancelling",
        "Filter and route": "sql/guide/filters",
        "Replay and move consumers": "sql/guide/positions",
        "Read without claiming": "sql/guide/reading",
        "Keep history and results": "sql/guide/history",
        "Capture a table, outbox": "sql/guide/capture",
        "Limit keys": "sql/guide/keys",
        "Latest wins": "sql/guide/latest-wins",
        "Limit a consumer": "sql/guide/limits",
        "Slow producers down": "sql/guide/back-pressure",
    },
    "How-to: Spark": {
        "Recipes": "spark_pgqueue/guide/cookbook",
        "Write and settle from a query": "spark_pgqueue/guide/writing",
        "Give payloads columns": "spark_pgqueue/guide/typed",
        "Write into tables": "spark_pgqueue/guide/into-tables",
        "Read a stream without a consumer": "spark_pgqueue/guide/streams",
        "Archive old messages": "spark_pgqueue/guide/archive",
        "Query the queue's tables": "spark_pgqueue/guide/tables",
        "Keep checkpoints": "spark_pgqueue/guide/checkpoints",
        "Get past a poison message": "spark_pgqueue/guide/poison-batches",
        "Watch a query": "spark_pgqueue/guide/watching",
        "Scale a query": "spark_pgqueue/guide/scale",
        "Define a pipeline": "spark_pgqueue/guide/pipelines",
        "Keep a captured table's history": "spark_pgqueue/guide/auto-cdc",
        "Use several servers": "spark_pgqueue/guide/servers",
    },
    "How-to: operation": {
        "Connect, permit, upgrade, back up": "sql/guide/operations",
        "Deploy": "sql/guide/deploy",
        "Monitor": "sql/guide/monitoring",
        "Serve the web page": "sql/guide/web",
        "Keep and delete messages": "sql/guide/retention",
        "Use a managed Postgres": "sql/guide/managed",
        "Restore and fail over": "sql/guide/restore",
    },
    "Reference": {
        "Command line": "sql/guide/command-line",
        "SQL functions and views": "sql/guide/reference",
        "Spark options and columns": "spark_pgqueue/guide/options",
        "Settings": "sql/guide/settings",
        "Guarantees and limits": "sql/guide/guarantees",
        "Where it runs": "spark_pgqueue/guide/where-it-runs",
        "Changes": "CHANGELOG",
    },
    "Explanation": {
        "Concepts and words": "sql/guide/concepts",
        "Which queue": "sql/guide/peers",
        "Beside Kafka's connector": "spark_pgqueue/guide/kafka",
        "Figures": "tests/benchmarks/README",
    },
    "How it is made": {
        "Contributing, security, support": "CONTRIBUTING",
        "The SQL": "sql/README",
        "One receive, step by step": "sql/one-receive",
        "The rows of a consumer, step by step": "sql/rows",
        "Changing something": "sql/changing",
        "The Python side": "spark_pgqueue/README",
        "Tests": "tests/README",
    },
}
"""The sections of the site, each with the titles of its pages and their files, without `.md`."""

LESSONS = "notebooks/README"
"""The page below which the notebooks are."""


def toctrees() -> str:
    """The sections, as Sphinx wants them at the end of its first page."""
    return "\n".join(
        _toctree(
            [f"{title} </{page}>" for title, page in pages.items()], f":caption: '{section}'\n"
        )
        for section, pages in SECTIONS.items()
    )


def lessons() -> str:
    """The notebooks, as Sphinx wants them at the end of their page."""
    return _toctree(["/notebooks/*"], ":glob:\n")


def _toctree(entries: list[str], option: str) -> str:
    return f"\n\n```{{toctree}}\n:hidden:\n{option}\n" + "\n".join(entries) + "\n```\n"
