"""Airflow's view of this package: the scheme pgqueue of `MessageQueueTrigger` (extra `airflow`)."""

from __future__ import annotations

from typing import Any


def provider_info() -> dict[str, Any]:
    """What Airflow asks of a provider: the entry point, which imports nothing of Airflow."""
    return {
        "package-name": "spark-pgqueue",
        "name": "spark-pgqueue",
        "description": "Messages of spark-pgqueue, a queue in Postgres, as events.",
        "queues": ["spark_pgqueue.airflow.triggers.PgQueueProvider"],
    }
