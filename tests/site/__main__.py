"""Builds the site into `build/site`; each warning, as of a link that leads nowhere, fails it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(pages: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the pages in a folder, in strict mode: all warnings, and then an error."""
    strict = ["--fail-on-warning", "--keep-going", "--nitpicky"]
    places = ["--conf-dir", Path(__file__).parent, pages, site]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "--builder", "html", *strict, *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build/site", help="default: %(default)s")
    site = parser.parse_args().to
    built = build(ROOT, site)
    print(built.stderr, end="", file=sys.stderr)
    print(f"the site is {site}/index.html" if built.returncode == 0 else "the site has errors")
    return built.returncode


if __name__ == "__main__":
    raise SystemExit(main())
