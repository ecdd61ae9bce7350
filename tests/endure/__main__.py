"""`make endure`: messages through Spark, workers and a group, while everything is killed.

Each round ends with a judgement: every message came to every way to consume once, in the order of
its key. The tally of all runs is `tally.json`. Ctrl-C, or kill -9, ends a run; the next one goes on
with the queue that it finds, in the middle of a round.

python -m tests.endure --minutes 60
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tests.endure import tally
from tests.endure.run import Run, put_aside
from tests.endure.world import World

HOME = Path(tempfile.gettempdir()) / "pgqueue-endure"


def main(
    minutes: Annotated[float, typer.Option(help="End after the round of this minute.")] = 60,
    kills: Annotated[int, typer.Option(help="End when so many were done, in this run.")] = 10**6,
    round_seconds: Annotated[float, typer.Option(help="A round sends and kills so long.")] = 240,
    pause: Annotated[float, typer.Option(help="At most, between kills, in seconds.")] = 3,
    backlog: Annotated[int, typer.Option(help="Producers wait at more.")] = 900_000,
    master: Annotated[str, typer.Option(help="Of Spark.")] = "local-cluster[2,1,1024]",
    home: Annotated[Path, typer.Option(help="Servers, checkpoints, what goes on.")] = HOME,
    seed: Annotated[int | None, typer.Option(help="For the kinds of kills.")] = None,
) -> None:
    """Kill whatever there is, round after round, and judge what came; ends with 1 at a finding."""
    seed = random.randrange(10**6) if seed is None else seed
    print(f"--seed {seed} --home {home}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no process behind
    world = World(home, master, backlog)
    end = time.monotonic() + 60 * minutes
    ok = True
    try:
        run = Run(world, round_seconds, pause, seed)
        while ok and time.monotonic() < end and run.kills < kills:
            ok = run.round().ok
            tally.write_page()
        print(f"{run.sent:,} messages, {run.kills} kills in this run", flush=True)
    finally:
        world.close()
    if not ok:
        print(f"the servers and the ledger are in {put_aside(home)}")
        sys.exit(1)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
