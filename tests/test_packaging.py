"""What is installed and what make offers: package data, metadata, commands, the prompt."""

from __future__ import annotations

import importlib
import importlib.resources
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]
TARGETS = ("demo", "test", "check", "soak", "test-gpu", "sanitize", "bench", "fmt", "clean")


@pytest.fixture
def pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())


def run_make(*arguments: str, folder: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """Run make as a person does: without what an outer make hands down."""
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL"}}
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def unpackaged(package: Path, patterns: list[str]) -> list[Path]:
    """Files of the package that are needed when it runs but that no pattern would install."""
    needed = [p for p in package.rglob("*") if p.suffix in {".cu", ".cuh"} or p.name == "py.typed"]
    covered = {path for pattern in patterns for path in package.glob(pattern)}
    return sorted(set(needed) - covered)


def test_kernel_sources_are_package_data(pyproject: dict[str, Any]) -> None:
    patterns = pyproject["tool"]["setuptools"]["package-data"]["hsswap"]
    assert unpackaged(PROJECT / "hsswap", patterns) == []
    assert {"py.typed", "ptx/*.cu", "ptx/*.cuh"} == set(patterns)


def test_the_package_data_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "ptx" / "deep").mkdir(parents=True)
    for name in ("py.typed", "ptx/a.cu", "ptx/b.cuh", "ptx/deep/c.cu"):
        (tmp_path / name).write_text("")
    expected = [tmp_path / "ptx/b.cuh", tmp_path / "ptx/deep/c.cu"]
    assert unpackaged(tmp_path, ["py.typed", "ptx/*.cu"]) == expected


def test_kernel_sources_are_read_as_resources() -> None:
    resources = importlib.resources.files("hsswap")
    assert resources.joinpath("py.typed").is_file()
    for path in (PROJECT / "hsswap" / "ptx").glob("*.cu*"):
        assert resources.joinpath("ptx", path.name).read_text() == path.read_text()


def test_licence_and_floor(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert all((PROJECT / name).is_file() for name in project["license-files"])
    assert (PROJECT / project["readme"]).is_file()


def test_every_base_dependency_has_a_bound(pyproject: dict[str, Any]) -> None:
    assert all(re.search(r"[<>=]", line) for line in pyproject["project"]["dependencies"])


def test_the_console_script_exists(pyproject: dict[str, Any]) -> None:
    module, function = pyproject["project"]["scripts"]["hsswap"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_ci_calls_make() -> None:
    script = PROJECT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0].startswith("#!")
    assert lines[0].endswith("bash")
    assert "set -euo pipefail" in lines
    assert lines[-1] == "make check test"


def test_make_alone_lists_every_target() -> None:
    listed = dict(re.findall(r"^  ?([a-z-]+) +(\S.*)$", run_make().stdout, re.MULTILINE))
    assert set(TARGETS) <= set(listed)
    # ... and nothing that is missing from the list exists.
    phony = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == set(listed)


def test_an_old_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((PROJECT / name).read_text())
    done = run_make("test", "PYTHON=false", folder=tmp_path)
    assert done.returncode != 0
    assert "hsswap needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def make_prompt(characters: int, out: Path) -> subprocess.CompletedProcess[str]:
    """Run bench/make_prompt.py."""
    script = str(PROJECT / "bench" / "make_prompt.py")
    command = [sys.executable, script, "--characters", str(characters), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_prompt_has_the_length_asked_for(tmp_path: Path) -> None:
    first, second = tmp_path / "new" / "a.txt", tmp_path / "b.txt"
    assert make_prompt(9300, first).returncode == 0
    assert make_prompt(9300, second).returncode == 0
    text = first.read_text(encoding="utf-8")
    assert len(text) == 9300
    assert text == second.read_text(encoding="utf-8")


@pytest.mark.parametrize("characters", [0, -1, 10**9])
def test_a_prompt_that_cannot_be_made_is_refused(tmp_path: Path, characters: int) -> None:
    done = make_prompt(characters, tmp_path / "a.txt")
    assert done.returncode == 2
    assert f"got {characters}" in done.stderr
    assert not (tmp_path / "a.txt").exists()
