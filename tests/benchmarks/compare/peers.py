"""Which other systems take part, and how each is called where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.compare import pgmq, pgque
from tests.benchmarks.compare.absurd import Absurd
from tests.benchmarks.compare.pgque import PgQue
from tests.benchmarks.compare.pgqueuer import PgQueuer
from tests.benchmarks.compare.procrastinate import Procrastinate
from tests.benchmarks.compare.sides import Side

BY_PACKAGE: dict[str, tuple[str, Callable[[], Side]]] = {
    "procrastinate": ("procrastinate", Procrastinate),
    "pgqueuer": ("pgqueuer", PgQueuer),
    "absurd": ("absurdctl", Absurd),
}
"""By the name of a peer: the package of PyPI, and the side."""

BY_SQL = {"pgque": "sql/pgque.sql of github.com/NikolayS/pgque"}
"""By the name of a peer: what it is installed from, where no package has it."""

NAMES = ("pgmq", *BY_PACKAGE, *BY_SQL)


@dataclass
class Peers:
    """The systems of a run.

    Attributes:
        has_pgmq: whether pgmq is there, which takes part in all scenarios.
        sides: the others, which have a scenario of their own.
        versions: of all.
        missing: a sentence for each that was asked for and is not there.
    """

    has_pgmq: bool = False
    sides: list[Side] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def find(names: Sequence[str] = NAMES, sql: Mapping[str, Path] | None = None) -> Peers:
    """Those of the peers that are there.

    Args:
        names: of the peers.
        sql: paths to the SQL of those that no package has.
    """
    peers = Peers()
    if "pgmq" in names:
        peers.has_pgmq = pgmq.is_installed()
        if peers.has_pgmq:
            peers.versions["pgmq"] = pgmq.version()
        else:
            peers.missing.append("pgmq is left out: pip install pgmq")
    for name, (package, make) in BY_PACKAGE.items():
        if name not in names:
            continue
        if find_spec(package) is None:
            peers.missing.append(f"{name} is left out: pip install {package}")
        else:
            peers.sides.append(make())
            peers.versions[name] = version(package)
    if "pgque" in names:
        if path := (sql or {}).get("pgque"):
            peers.sides.append(PgQue(path))
            peers.versions["PgQue"] = pgque.version(path)
        else:
            peers.missing.append(f"pgque is left out: --sql pgque=PATH, {BY_SQL['pgque']}")
    return peers
