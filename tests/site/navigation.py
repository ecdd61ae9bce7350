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
        "All pages, by task": "sql/guide/README",
        "Send: in your transaction, once": "sql/guide/sending",
        "FastAPI, SQLAlchemy, Django": "sql/guide/frameworks",
        "Run workers": "sql/guide/workers",
        "Retries, dead letters, cancelling, history": "sql/guide/failures",
        "Priorities, fairness, limits": "sql/guide/settings",
        "Delays, expiry, schedules": "sql/guide/delays",
        "Start anywhere, seek, replay": "sql/guide/positions",
        "Read without claiming": "sql/guide/reading",
        "Filter and route": "sql/guide/filters",
        "Capture a table, outbox": "sql/guide/capture",
        "Test your code": "sql/guide/testing",
        "Node, Java, Go, HTTP": "sql/guide/languages",
        "Move from another queue": "sql/guide/moving",
        "Programs of pgmq, Celery": "sql/guide/pgmq",
    },
    "How-to: Spark": {
        "Recipes": "spark_pgqueue/guide/cookbook",
        "Write and settle from a query": "spark_pgqueue/guide/writing",
        "Read JSON as columns": "spark_pgqueue/guide/typed",
        "Write into tables": "spark_pgqueue/guide/into-tables",
        "Archive old messages": "spark_pgqueue/guide/archive",
        "Read the queue as DataFrames": "spark_pgqueue/guide/tables",
        "Checkpoints, poison messages": "spark_pgqueue/guide/checkpoints",
        "Scale, several servers": "spark_pgqueue/guide/scale",
        "Pipelines, auto CDC": "spark_pgqueue/guide/pipelines",
    },
    "How-to: operation": {
        "Deploy": "sql/guide/deploy",
        "Operate": "sql/guide/operations",
        "Monitor": "sql/guide/monitoring",
        "Keep and delete messages": "sql/guide/retention",
        "Restore and fail over": "sql/guide/restore",
    },
    "Reference": {
        "Command line": "sql/guide/command-line",
        "SQL functions and views": "sql/guide/reference",
        "Spark options and columns": "spark_pgqueue/guide/options",
        "Guarantees and limits": "sql/guide/guarantees",
        "Promises and their tests": "tests/promises",
        "Versions, clusters, managed Postgres": "spark_pgqueue/guide/where-it-runs",
        "Changes": "CHANGELOG",
    },
    "Explanation": {
        "Concepts": "sql/guide/concepts",
        "Compare with other queues": "sql/guide/peers",
        "Compare with Kafka's connector": "spark_pgqueue/guide/kafka",
        "Figures": "tests/benchmarks/README",
    },
    "How it is made": {
        "Contributing, security, support": "CONTRIBUTING",
        "The SQL": "sql/README",
        "One receive, step by step": "sql/one-receive",
        "The rows of a consumer, step by step": "sql/rows",
        "Changing something": "sql/changing",
        "Decisions, and what was rejected": "sql/decisions/README",
        "The Python side": "spark_pgqueue/README",
        "Tests": "tests/README",
        "Releases, and what a host must set up": "tests/release",
    },
}
"""The sections of the site, each with the titles of its pages and their files, without `.md`."""

BELOW = {"notebooks/README": "/notebooks/*", "sql/decisions/README": "/sql/decisions/*"}
"""Pages with pages or notebooks below them, which the sections do not name."""


def toctrees() -> str:
    """The sections, as Sphinx wants them at the end of its first page."""
    return "\n".join(
        _toctree(
            [f"{title} </{page}>" for title, page in pages.items()], f":caption: '{section}'\n"
        )
        for section, pages in SECTIONS.items()
    )


def below(page: str) -> str:
    """What is below a page, as Sphinx wants it at the end of that page."""
    return _toctree([BELOW[page]], ":glob:\n")


def _toctree(entries: list[str], option: str) -> str:
    return f"\n\n```{{toctree}}\n:hidden:\n{option}\n" + "\n".join(entries) + "\n```\n"
