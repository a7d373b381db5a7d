"""What the README and its neighbours say can be done can be done: code runs, commands parse, and
targets of make and files are there.
"""

from __future__ import annotations

import pydoc
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hsswap
from hsswap.__main__ import make_parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def commands(document: str, program: str) -> list[str]:
    """What a document calls a program with: lines of its blocks, and code inside sentences."""
    text = text_of(document)
    lines = re.findall(rf"^{program} +([^#\n]*)", text, re.MULTILINE)
    return lines + re.findall(rf"`{program} ([^`\n]+)`", text)


def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert code is not None
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code[1]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    tokens, bytes_read = map(int, done.stdout.split())
    assert tokens == 3072
    assert bytes_read > 0


def test_names_are_there_after_import_hsswap() -> None:
    names = set(re.findall(r"`(?:with )?(hsswap\.[A-Za-z_0-9.]+)", text_of("README.md")))
    assert len(names) > 5
    for name in sorted(names):  # each in a process that has loaded nothing else
        done = subprocess.run(
            [sys.executable, "-c", f"import hsswap; {name}"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr


def test_help_shows_the_public_names() -> None:
    shown = pydoc.plain(pydoc.render_doc(hsswap))
    shown_names = re.findall(r"^    (?:class )?(\w+)\(", shown, re.MULTILINE)
    missing = set(hsswap.__all__) - set(shown_names)
    assert missing == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_parse(document: str) -> None:
    found = commands(document, "hsswap")
    assert found or document == "CONTRIBUTING.md"
    for line in found:
        words = shlex.split(line)
        if words[0] == "generate" and "--prompt-file" not in words:  # an option inside a sentence
            words += ["--prompt-file", "F"]
        if words != ["bench"]:
            make_parser(words).parse_args(words)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_targets_of_make_exist(document: str) -> None:
    known = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    found = [word for line in commands(document, "make") for word in line.split()]
    targets = {word for word in found if "=" not in word}
    assert targets
    assert targets <= known


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document: str) -> None:
    # As they are written there: from the root, from the package, from the tests, or of a kernel.
    homes = [ROOT / home for home in ("", "hsswap", "hsswap/ptx", "tests")]
    names = re.findall(r"[`(]([a-z0-9_/.-]+\.(?:py|cu|cuh|json|md))[`)]", text_of(document))
    assert names
    missing = [
        name
        for name in names
        if not any((home / name).is_file() for home in homes)
        and not list((ROOT / "hsswap").rglob(name))
    ]
    assert missing == []


def test_the_tests_that_are_named_exist() -> None:
    names = re.findall(r"`((?:[a-z]+/)?test_[a-z0-9_]+)`", text_of("ARCHITECTURE.md"))
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "tests" / f"{name}.py").is_file()] == []
