"""The public harness hardbyte/postgresql-job-queue-benchmarking without Docker, with our adapter.

    python -m tests.benchmarks.published.harness CHECKOUT run --systems spark-pgqueue ...

CHECKOUT is the harness; what follows are its own arguments. It has a fixed database: a server on
localhost, port 15555, with pgstattuple and the superuser bench, whose password is bench. As its
`docker compose` starts and stops that server, a stand-in that does nothing is put before `docker`
on the PATH: start the server yourself, with the harness's postgres.conf. For instance

    initdb -D data -U bench --auth=scram-sha-256 --pwfile=<(echo bench)
    cat CHECKOUT/postgres.conf >> data/postgresql.conf
    pg_ctl -D data -o "-p 15555 -h localhost -k ''" start

Adapters in Python run as they are where their packages are installed; others are images.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.benchmarks.public_harness import MANIFEST, SYSTEM

ROOT = Path(__file__).parents[3]
NATIVE = ("procrastinate",)
"""Adapters of the harness that need no more than Python packages."""

Launch = Callable[[Any, Any], Any]
"""Makes what the harness starts, of the manifest of an adapter and of variables."""


def main(arguments: Sequence[str]) -> int:
    """Run the harness of a checkout with its arguments."""
    if not arguments or not (Path(arguments[0]) / "bench_harness").is_dir():
        sys.exit(str(__doc__))
    checkout = Path(arguments[0]).resolve()
    sys.path.insert(0, str(checkout))
    register(import_module("bench_harness.adapters"), checkout)
    orchestrator = import_module("bench_harness.orchestrator")  # knows what is registered now
    with tempfile.TemporaryDirectory() as folder:
        stand_in(Path(folder))
        sys.argv[1:] = arguments[1:]
        return orchestrator.main() or 0


def register(adapters: Any, checkout: Path) -> None:
    """Add our adapter to those of the harness, and let others run without an image.

    Args:
        adapters: the module `bench_harness.adapters`.
    """

    def launcher(argv: list[str], folder: Path) -> Launch:
        def launch(manifest: Any, overrides: Any) -> Any:
            environment = {**adapters._base_env(manifest, overrides), "PYTHONPATH": str(folder)}
            argv_of_all = [sys.executable, *argv]
            return adapters.LaunchSpec(argv=argv_of_all, env=environment, cwd=str(folder))

        return launch

    ours = checkout / f"{SYSTEM}-bench"
    ours.mkdir(exist_ok=True)
    (ours / "adapter.json").write_text(json.dumps(MANIFEST, indent=2) + "\n")
    launch = launcher(["-m", "tests.benchmarks.public_harness"], ROOT)
    adapters.ADAPTERS[SYSTEM] = entry(adapters, ours, launch)
    for name in NATIVE:
        folder = checkout / f"{name}-bench"
        adapters.ADAPTERS[name] = entry(adapters, folder, launcher(["main.py"], folder))


def entry(adapters: Any, folder: Path, launch: Launch) -> Any:
    """An adapter for which nothing is built."""
    return adapters.AdapterEntry(bench_dir=folder, builder=lambda skip: None, launcher=launch)


def stand_in(folder: Path) -> None:
    """Put a `docker` that does nothing before others on the PATH."""
    program = folder / "docker"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
