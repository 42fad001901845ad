"""The files that set the project up agree with each other: constraints, Makefile, Dockerfile, CI script, licence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def constraint_versions(root: Path) -> dict[str, str]:
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), "every line is name==version"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def all_requirements(root: Path) -> list[Requirement]:
    """Requirements of the package and of the extras that `make setup` installs."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"]]
    requirements = [Requirement(text) for text in wanted]
    for requirement in [r for r in requirements if r.name == "moe-train"]:
        requirements += [Requirement(text) for extra in requirement.extras for text in extras[extra]]
    return [r for r in requirements if r.name != "moe-train" and (r.marker is None or r.marker.evaluate())]


def test_constraints_pin_every_requirement_to_a_version_it_accepts(repo_root: Path) -> None:
    pinned = constraint_versions(repo_root)
    for requirement in all_requirements(repo_root):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is required but not in constraints.txt; run `make lock`"
        assert requirement.specifier.contains(pinned[name]), f"{name}=={pinned[name]} does not satisfy {requirement}"


def test_constraints_cover_what_is_installed(repo_root: Path) -> None:
    """The environment the tests run in is the one constraints.txt describes, so a pinned version is a tested version."""
    pinned = constraint_versions(repo_root)
    for requirement in all_requirements(repo_root):
        name = canonicalize_name(requirement.name)
        assert metadata.version(name).split("+")[0] == pinned[name], f"{name}: run `make setup`"


def test_torch_is_pinned_exactly_and_newer_releases_are_accepted(repo_root: Path) -> None:
    torch = next(r for r in all_requirements(repo_root) if r.name == "torch")
    assert constraint_versions(repo_root)["torch"] == "2.13.0"
    assert all(torch.specifier.contains(version) for version in ("2.11.0", "2.14.1", "2.15.0"))


def test_ci_script_is_executable_bash_and_runs_make_test(repo_root: Path) -> None:
    script = repo_root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert text.rstrip().endswith("exec make test")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_makefile_help_lists_every_target(repo_root: Path) -> None:
    listed = subprocess.run(["make", "-s", "help"], cwd=repo_root, check=True, capture_output=True, text=True).stdout
    names = {line.split()[0] for line in listed.splitlines() if line}
    phony = re.search(r"^\.PHONY: (.*)$", (repo_root / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert names == set(phony.group(1).split())


def test_setup_refuses_an_old_python_with_one_line(repo_root: Path, tmp_path: Path) -> None:
    """An interpreter that says it is too old: exit code of make, the number needed and the way out, and no .venv."""
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        (tmp_path / name).write_text((repo_root / name).read_text())
    done = subprocess.run(["make", "-s", "setup", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "make setup PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_dockerfile_takes_its_base_as_argument_and_ends_as_another_user_than_root(repo_root: Path) -> None:
    lines = (repo_root / "Dockerfile").read_text().splitlines()
    steps = [line.split()[0] for line in lines if line and line[0].isupper()]
    assert steps[:2] == ["ARG", "FROM"]
    assert "ARG BASE=python:3.11-slim" in lines
    assert "FROM ${BASE}" in lines
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
    assert "ADD" not in steps
    assert all("--no-cache-dir" in line for line in lines if "pip install" in line)


@pytest.mark.skipif(not (Path(sys.executable).parent / "hadolint").exists(), reason="hadolint has no package for this platform")
def test_dockerfile_passes_hadolint(repo_root: Path) -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", "Dockerfile"], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_dockerfile_copies_all_that_the_wheel_needs(repo_root: Path) -> None:
    """.dockerignore lets in exactly what `pip install .` reads."""
    lines = (repo_root / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert kept == {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "moe_train", "parallel", "conf"}
    assert all((repo_root / name).exists() for name in kept)


def test_pre_commit_hooks_are_local_and_well_formed(repo_root: Path) -> None:
    subprocess.run([Path(sys.executable).parent / "pre-commit", "validate-config", ".pre-commit-config.yaml"], cwd=repo_root, check=True)
    config = yaml.safe_load((repo_root / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    assert all(hook["language"] == "system" for repo in config["repos"] for hook in repo["hooks"])


def test_licence_is_apache_2(repo_root: Path) -> None:
    text = (repo_root / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


def test_nothing_names_a_registry_host(repo_root: Path) -> None:
    """Mirrors differ from place to place: pip's own configuration says where packages come from."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run", "Dockerfile"):
        text = (repo_root / name).read_text()
        assert not re.search(r"--(extra-)?index-url|--find-links|pypi\.org|download\.pytorch\.org", text), name
