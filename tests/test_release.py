"""`make release`: its files are complete and the same each time, and only a release gets them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests import release
from tests.pages import ROOT, blocks_of

PAGE = (ROOT / "tests/release.md").read_text()


def test_what_the_sdist_builds_is_the_same_byte_for_byte(tmp_path: Path):
    """Built elsewhere, without git, and with other times and rights of the files."""
    first, second = tmp_path / "first", tmp_path / "second"
    release.build(ROOT, first)
    shutil.unpack_archive(first / release.PACKAGES[1], tmp_path)
    there = tmp_path / release.STEM
    for file in there.rglob("*.sql"):
        file.chmod(0o600)
        os.utime(file, (1, 1))
    release.build(there, second)
    assert {file.name for file in first.iterdir()} == set(release.PACKAGES)
    for name in release.PACKAGES:
        assert digest(first / name) == digest(second / name), name


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_a_release_has_sums_and_names_what_the_wheel_depends_on(tmp_path: Path):
    (tmp_path / "spark_pgqueue-0.0.9.tar.gz").write_text("an earlier release")
    files = release.release(tmp_path, key=None)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [*release.PACKAGES, release.BILL, release.SUMS]
    assert checked(tmp_path) == 0

    bill = json.loads((tmp_path / release.BILL).read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == (
        "CycloneDX",
        release.VERSION,
    )
    listed = {normal(each["name"]): each["version"] for each in bill["components"]}
    needed = [Requirement(each) for each in release.PROJECT["dependencies"]]
    for each in needed:
        assert each.specifier.contains(listed[normal(each.name)]), each
    assert all(re.match(r"\d", version) for version in listed.values())
    assert not {"pip", "pytest", "pyspark", "cyclonedx-bom"} & listed.keys()
    (direct,) = [
        each["dependsOn"] for each in bill["dependencies"] if each["ref"] == "root-component"
    ]
    assert {normal(each.split("==")[0]) for each in direct} == {normal(r.name) for r in needed}

    with (tmp_path / release.PACKAGES[0]).open("ab") as wheel:
        wheel.write(b"\0")
    assert checked(tmp_path) != 0


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def checked(folder: Path) -> int:
    """How `sha256sum --check` ends, as the page has readers call it."""
    command = ["sha256sum", "--check", "--quiet", release.SUMS]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode


@pytest.mark.skipif(not shutil.which("gpg"), reason="gpg is missing: apt install gnupg")
def test_sums_are_signed_with_the_key_that_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GNUPGHOME", str(tmp_path / "keys"))
    (tmp_path / "keys").mkdir(mode=0o700)
    generate = ["--passphrase", "", "--quick-generate-key", "a maintainer", "ed25519", "sign"]
    try:
        gpg(*generate)
        (tmp_path / release.SUMS).write_text("0  a file\n")
        release.sign(tmp_path, "a maintainer")
        verify = ("--verify", str(tmp_path / release.SIGNATURE), str(tmp_path / release.SUMS))
        assert gpg(*verify) == 0
        (tmp_path / release.SUMS).write_text("1  a file\n")
        assert gpg(*verify) != 0
        with pytest.raises(SystemExit, match="somebody else"):
            release.sign(tmp_path, "somebody else")
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], check=True)


def gpg(*arguments: str) -> int:
    command = ["gpg", "--batch", "--quiet", "--pinentry-mode", "loopback", *arguments]
    return subprocess.run(command, capture_output=True).returncode


def test_only_a_commit_of_a_dated_version_is_released(tmp_path: Path, monkeypatch, capsys):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(release, "ROOT", checkout)
    monkeypatch.setattr(release.freeze, "released", lambda: [release.schema.expected_version()])
    changes = checkout / "CHANGELOG.md"
    changes.write_text(f"# Changelog\n\n## {release.VERSION} - unreleased\n")
    git(checkout, "init", "--quiet")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "the first one")
    with pytest.raises(SystemExit, match="no release"):
        release.main(["--to", str(tmp_path / "dist")])
    said = capsys.readouterr().err
    assert "not committed" in said
    assert "unreleased" in said
    assert not (tmp_path / "dist").exists()

    changes.write_text(f"# Changelog\n\n## {release.VERSION} - 2026-12-24\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "a release")
    assert release.obstacles() == []
    git(checkout, "tag", "v0.0.9")
    assert ["v0.0.9" in each for each in release.obstacles()] == [True]
    git(checkout, "tag", f"v{release.VERSION}")
    assert release.obstacles() == []
    monkeypatch.setattr(release.freeze, "released", lambda: [1])
    assert ["frozen" in each for each in release.obstacles()] == [True]


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_workflows_of_the_page_call_what_there_is():
    """And an index gets packages alone: it refuses any other file."""
    makefile = (ROOT / "Makefile").read_text()
    workflows = [yaml.safe_load(text) for language, text in blocks_of(PAGE) if language == "yaml"]
    jobs = {name: job for each in workflows for name, job in each["jobs"].items()}
    assert {"check", "build", "publish"} <= jobs.keys()
    steps = [step for job in jobs.values() for step in job["steps"]]
    typed = " ".join(step.get("run", "") for step in steps)
    for target in re.findall(r"make (\w+)", typed):
        assert f"\n{target}:" in makefile, target
    assert ".ci/run" in typed
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == [
        "publish"
    ]
    (given,) = [
        step["with"]["path"]
        for step in jobs["build"]["steps"]
        if step.get("with", {}).get("name") == "packages"
    ]
    assert given.split() == ["dist/*.whl", "dist/*.tar.gz"]
