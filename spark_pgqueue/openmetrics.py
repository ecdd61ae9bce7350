"""The text format of OpenMetrics, which Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from spark_pgqueue.printable import printable

KIND = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Sample = tuple[str, Mapping[str, str], float | int | None]


class Lines(NamedTuple):
    """The lines of a metric.

    Attributes:
        name: the name without the suffix of the type.
        type: gauge, counter or histogram.
        help: one sentence.
        samples: the suffix of the name, the labels and the value of each; None for no value.
        unit: the last word of the name; empty for none.
    """

    name: str
    type: str
    help: str
    samples: Iterable[Sample]
    unit: str = ""


def text(metrics: Iterable[Lines]) -> str:
    """Metrics as text."""
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"# TYPE {metric.name} {metric.type}")
        if metric.unit:
            lines.append(f"# UNIT {metric.name} {metric.unit}")
        lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
        lines += [
            f"{metric.name}{suffix}{_written(labels)} {value}"
            for suffix, labels, value in metric.samples
            if value is not None
        ]
    return "\n".join([*lines, "# EOF", ""])


def _written(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    value = printable(value, keep="\n")  # the text is also printed on terminals
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
