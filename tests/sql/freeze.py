"""The SQL of each released version of the schema, kept to upgrade from: `versions/<n>.sql.xz`.

    python -m tests.sql.freeze

writes the file of this checkout's version, at the commit that becomes its release. From then on the
file stays as it is: `test_upgrade.py` installs it, uses it, and upgrades it.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path

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


def _tags(file: Path) -> list[str]:
    """The releases that have the file."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(
            ["git", *words], cwd=VERSIONS, check=True, text=True, stdout=subprocess.PIPE
        )
        return done.stdout.split()

    commit = git("log", "-1", "--format=%H", "--", file.name)
    return git("tag", "--list", "v*", "--contains", *commit) if commit else []


def main() -> None:
    file = _file(schema.expected_version())
    VERSIONS.mkdir(exist_ok=True)
    if tags := _tags(file):
        sys.exit(f"{file.name} is part of the release {tags[0]}: a change of the schema is a new "
                 "version, see 'A migration' in sql/changing.md")  # fmt: skip
    text = schema.script(transaction=False).encode()
    file.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
