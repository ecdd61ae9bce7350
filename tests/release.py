"""`make release`: the files of a release, in `dist/`.

python -m tests.release          of a clean checkout whose version has a date in CHANGELOG.md
python -m tests.release --trial  of any checkout; prints what a release would refuse

The files are the wheel, the sdist, the bill of materials of what the wheel depends on (CycloneDX),
and SHA256SUMS of the three. With SIGNING_KEY, a key of gpg, also SHA256SUMS.asc.

The same commit gives the same wheel and sdist, byte for byte, with the same version of hatchling,
which the wheel's file WHEEL names. The bill of materials has the versions that pip chooses on that
day, for this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from spark_pgqueue.postgres import schema
from tests.sql import freeze

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
STEM = f"spark_pgqueue-{VERSION}"
PACKAGES = (f"{STEM}-py3-none-any.whl", f"{STEM}.tar.gz")
"""What an index takes; it refuses the other files."""
BILL = f"{STEM}.cdx.json"
SUMS = "SHA256SUMS"
SIGNATURE = f"{SUMS}.asc"
WAIT = 600


def obstacles() -> list[str]:
    """Why this checkout is not the one of a release."""
    heading = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].splitlines()[0]
    number = schema.expected_version()
    tags = _git("tag", "--points-at", "HEAD").split()
    found = {
        "there are changes that are not committed": bool(_git("status", "--porcelain")),
        f"CHANGELOG.md begins with {heading!r}, not with {VERSION} and a date": (
            not heading.startswith(f"{VERSION} - 2")
        ),
        f"version {number} of the schema is not frozen: see tests/sql/freeze.py": (
            number not in freeze.released()
        ),
        f"the commit has the tags {tags}, and not v{VERSION}": (
            bool(tags) and f"v{VERSION}" not in tags
        ),
    }
    return [sentence for sentence, is_so in found.items() if is_so]


def environment() -> dict[str, str]:
    """With the time of the commit as that of all files, unless SOURCE_DATE_EPOCH is set."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct").strip()
    return {**os.environ, **({"SOURCE_DATE_EPOCH": epoch} if epoch else {})}


def build(checkout: Path, folder: Path) -> None:
    """Build the wheel and the sdist of a checkout, or of an unpacked sdist."""
    _run(
        *(sys.executable, "-m", "hatchling", "build", "--directory", folder),
        *("--target", "wheel", "--target", "sdist"),
        cwd=checkout,
    )


def check(folder: Path) -> None:
    """Check that an index can show what the packages say about themselves."""
    packages = [folder / name for name in PACKAGES]
    _run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *packages)


def list_materials(folder: Path) -> None:
    """Write the bill of materials: what an environment with the wheel alone has."""
    with tempfile.TemporaryDirectory() as temporary:
        there = Path(temporary) / "venv"
        venv.create(there)  # without pip, which would be listed
        python = there / "bin/python"
        pip = (sys.executable, "-m", "pip", "--python", python)
        _run(*pip, "install", "--quiet", "--no-compile", folder / PACKAGES[0])
        # Without the extras, which would be listed as dependencies where something else needs them.
        keys = ("name", "version", "description", "license", "dependencies")
        lines = [f"{key} = {json.dumps(PROJECT[key])}" for key in keys]
        about = Path(temporary) / "pyproject.toml"
        about.write_text("\n".join(["[project]", *lines, ""]))
        _run(
            *(sys.executable, "-m", "cyclonedx_py", "environment", "--validate"),
            *("--output-reproducible", "--pyproject", about, "--mc-type", "library"),
            *("--output-format", "JSON", "--output-file", folder / BILL, python),
        )


def write_sums(folder: Path) -> None:
    """Write the sums as sha256sum does, which checks them."""
    lines = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in (*PACKAGES, BILL)
    ]
    (folder / SUMS).write_text("".join(lines))


def sign(folder: Path, key: str) -> None:
    """Sign the sums, and by these all files, with a key that gpg has."""
    _run(
        *("gpg", "--batch", "--yes", "--local-user", key, "--armor", "--detach-sign"),
        *("--output", folder / SIGNATURE, folder / SUMS),
    )


def release(folder: Path, key: str | None) -> list[Path]:
    """Make all files of the release in a folder, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.name.startswith(("spark_pgqueue-", SUMS)):
            old.unlink()
    build(ROOT, folder)
    check(folder)
    list_materials(folder)
    write_sums(folder)
    if key:
        sign(folder, key)
    names = (*PACKAGES, BILL, SUMS, *((SIGNATURE,) if key else ()))
    return [folder / name for name in names]


def _git(*arguments: str) -> str:
    """What git prints about this checkout; empty without one, as in an unpacked sdist."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""
    return _run("git", *arguments, env=dict(os.environ))


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd or ROOT,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trial", action="store_true", help="of any checkout")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="default: %(default)s")
    given = parser.parse_args(arguments)
    found = obstacles()
    for each in found:
        print(each, file=sys.stderr)
    if found and not given.trial:
        sys.exit("This is no release; --trial builds it nevertheless.")
    key = os.environ.get("SIGNING_KEY")
    for file in release(given.to, key):
        print(f"{file}: {file.stat().st_size:,} bytes")
    print("signed" if key else "not signed: SIGNING_KEY is not set")


if __name__ == "__main__":
    main()
