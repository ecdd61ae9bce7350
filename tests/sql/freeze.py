"""The SQL of each released version of the schema, kept to upgrade from: `versions/<n>.sql.xz`.

    python -m tests.sql.freeze

writes the file of this checkout's version, at the commit that becomes its release, and refuses to
replace one. The file stays as it is, which `DIGESTS` in `test_upgrade.py` records: the test
installs it, uses it, and upgrades it.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import psycopg

from spark_pgqueue.postgres import schema

VERSIONS = Path(__file__).parent / "versions"


def released() -> list[int]:
    """The versions that are kept."""
    return sorted(int(file.name.split(".")[0]) for file in VERSIONS.glob("*.sql.xz"))


def sql_of(version: int) -> str:
    """What `pgqueue install` ran in that version, without a transaction."""
    return lzma.decompress(_file(version).read_bytes()).decode()


def _file(version: int) -> Path:
    return VERSIONS / f"{version}.sql.xz"


def install(conn: psycopg.Connection, version: int) -> None:
    """Install a released version."""
    with conn.transaction():
        conn.execute("set local standard_conforming_strings = on")
        conn.execute(sql_of(version).encode(), prepare=False)


def main() -> None:
    file = _file(schema.expected_version())
    VERSIONS.mkdir(exist_ok=True)
    if file.exists():
        sys.exit(f"{file.name} is kept: a change of the schema is a new version, see 'A migration' "
                 "in sql/changing.md. Before its release, delete the file first.")  # fmt: skip
    text = schema.script(transaction=False).encode()
    file.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
