"""The program `pgqueue`, also `python -m spark_pgqueue`."""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module

from spark_pgqueue.command_line.app import MODULES, app


def main() -> None:
    """Run the command that the first argument names, without importing the other commands.

    Importing all of them takes as long as a short command runs. The help, completion and errors
    need all of them.
    """
    # Otherwise Python ends with a collection of garbage, a quarter of a short command's time.
    atexit.register(gc.freeze)
    modules = MODULES.get("".join(sys.argv[1:2]))
    for module in [f"commands.{each}" for each in modules] if modules else ["cli"]:
        import_module(f"spark_pgqueue.command_line.{module}")
    app(prog_name="pgqueue")


if __name__ == "__main__":
    main()
