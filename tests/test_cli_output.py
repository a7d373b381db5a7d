"""Standard streams that are full, closed or read by nobody: one line, exit 1, nothing left."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from hsswap.commands.output import OutputError, say
from tests.running import ENVIRONMENT, PROJECT, TinyRun


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun.make(tmp_path_factory.mktemp("tiny"))


def test_a_full_drive(tiny: TinyRun, tmp_path: Path) -> None:
    """A limit on the size of files takes the place of a full drive, which only root can make."""
    store = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, "-m", "hsswap", *tiny.arguments("--dir", str(store))],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hsswap: ")
    assert "File too large" in done.stderr
    assert not store.exists()


@pytest.mark.parametrize(
    ("arguments", "stream"),
    [
        (["--help"], "stdout"),
        (["doctor"], "stdout"),
        (["generate"], "stdout"),
        (["generate", "--json"], "stdout"),
        (["generate"], "stderr"),
    ],
)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_output(
    arguments: list[str], stream: str, buffered: bool, tiny: TinyRun, tmp_path: Path
) -> None:
    """As a full drive: no file may grow at all."""
    if "generate" in arguments:
        arguments = tiny.arguments("--tokens", "2", "--io", "memory", *arguments[1:])
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with (tmp_path / "full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hsswap", *arguments],
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=full if stream == "stdout" else subprocess.PIPE,
            stderr=full if stream == "stderr" else subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )
    assert done.returncode == 1
    if stream == "stdout":
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("hsswap: ")]
        assert said == ["hsswap: writing the output failed (File too large)"]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_descriptors(closed: tuple[int, ...], tiny: TinyRun, tmp_path: Path) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    store = tmp_path / "store"
    more = ("--tokens", "2", "--dir", str(store), "--json")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "hsswap", *tiny.arguments(*more)],
        cwd=PROJECT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=close,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('{"text"') == (1 not in closed)
    assert ("loading " in done.stderr) == (2 not in closed)
    assert "loading " not in done.stdout
    assert not store.exists()


class Failing(StringIO):
    """A stream whose writes fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "failed (No space left on device)"),
        (BrokenPipeError(errno.EPIPE, "gone"), "nobody reads it"),
        (UnicodeEncodeError("ascii", "é", 0, 1, "?"), "set PYTHONIOENCODING=utf-8"),
    ],
)
def test_a_stream_that_fails(error: Exception, words: str) -> None:
    with pytest.raises(OutputError) as caught:
        say("é", Failing(error))
    assert words in str(caught.value)
    assert caught.value.is_pipe == isinstance(error, BrokenPipeError)


def test_a_closed_stdout(tiny: TinyRun, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "hsswap", *tiny.arguments("--dir", str(tmp_path / "store"))],
            cwd=PROJECT,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert not (tmp_path / "store").exists()
