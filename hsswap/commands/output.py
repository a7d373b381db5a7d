"""What the command writes: every failure of a stream is one error, made for people."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hsswap.errors import HsswapError


class OutputError(HsswapError):
    """A stream that the command writes to does not take it. ``is_pipe``: nobody reads any more."""

    def __init__(self, reason: str, *, is_pipe: bool = False) -> None:
        super().__init__(f"writing the output failed ({reason})")
        self.is_pipe = is_pipe


def say(text: str, to: TextIO, *, end: str = "\n") -> None:
    """Write ``text`` at once. Raises OutputError."""
    try:
        print(text, end=end, file=to, flush=True)
    except BrokenPipeError as error:
        raise OutputError("nobody reads it", is_pipe=True) from error
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error
    except UnicodeEncodeError as error:
        remedy = "set PYTHONIOENCODING=utf-8"
        raise OutputError(f"{error.encoding} has not all of its letters; {remedy}") from error


def save(text: str, path: Path) -> None:
    """Write ``text`` and a last newline into a file. Raises OutputError."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from error


def open_standard_streams() -> None:
    """Put ``/dev/null`` where standard input, output or error is closed.

    Otherwise the next file opened takes the place, and what is printed ends in it; and libuv ends
    the process when it comes upon such a number.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one: those below are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def flush_standard_streams() -> None:
    """Write what is left, as Python would at exit, where it could only complain.

    Raises OutputError for standard output.
    """
    with suppress(OutputError):
        say("", sys.stderr, end="")
    say("", sys.stdout, end="")


def silence_standard_streams() -> None:
    """Let what could not be written go, or Python complains of it once more at exit."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, None)


class TextOutput:
    """The generated text: kept whole, and shown as it is made unless ``stream`` is None."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)

    def show(self, text: str) -> None:
        """The next piece. Raises OutputError."""
        self._pieces.append(text)
        if self._stream is not None:
            say(text, self._stream, end="")

    def finish(self) -> None:
        """End the last line. Raises OutputError."""
        if self._stream is not None:
            say("", self._stream)

    def leave_line(self) -> None:
        """After a failure: what follows shall not stand behind the text on a terminal."""
        if self._stream is None or not self._stream.isatty():
            return
        if self._pieces and not self.text.endswith("\n"):
            with suppress(OutputError):
                say("", self._stream)
