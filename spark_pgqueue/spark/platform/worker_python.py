"""The Python that Spark starts for its own processes, and the modules that it needs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable

from spark_pgqueue.postgres.errors import PgQueueError, how_to_install

PACKAGE = "spark_pgqueue"

NEEDED = (PACKAGE, "psycopg", "pyarrow", "adbc_driver_postgresql", "adbc_driver_manager")
"""The modules that the Python processes of Spark import, besides Spark's own."""

_FIND = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])
"""


def missing_from(python: str, needed: Iterable[str] = NEEDED) -> list[str]:
    """The modules that a Python lacks.

    Args:
        python: the program that Spark starts: a path, or a name on the PATH.
        needed: names of modules.

    Raises:
        PgQueueError: the program does not run.
    """
    try:
        found = subprocess.run(
            [python, "-c", _FIND, *needed], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PgQueueError(
            f"{python}, which Spark is to start, does not run: {error}", hint=set_pyspark_python()
        ) from None
    return found.stdout.split()


def set_pyspark_python() -> str:
    """The hint for a Python that lacks a module."""
    return (
        f"export PYSPARK_PYTHON={shlex.quote(sys.executable)} before the session is made, or "
        f"install there: {how_to_install()}"
    )
