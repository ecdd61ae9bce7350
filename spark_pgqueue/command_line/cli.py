"""The command line `pgqueue` with all of its commands.

`spark_pgqueue/__main__.py`, the program, imports only the module of one command where it can.
Results go to standard output, everything else to standard error.
"""

from importlib import import_module

from spark_pgqueue.command_line.app import MODULES, app

__all__ = ["app"]

for _module in sorted({each for modules in MODULES.values() for each in modules}):
    import_module(f"spark_pgqueue.command_line.commands.{_module}")
