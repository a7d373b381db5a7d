"""The command ``hsswap``. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from hsswap import __version__
from hsswap.commands.interrupts import Interrupted, Interrupts
from hsswap.commands.output import (
    OutputError,
    flush_standard_streams,
    open_standard_streams,
    say,
    silence_standard_streams,
)
from hsswap.errors import ArgumentError, ConfigError, HsswapError

OK, FAILED, USAGE = 0, 1, 2
EXIT_STATUS = (
    "exit status: 0 done, 1 failed or wrong result, 2 wrong usage, 129/130/143 ended by a signal"
)


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line like all others."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave with 2."""
        self.exit(USAGE, f"hsswap: {message}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse keeps to itself that help could not be written.
        if file is sys.stdout:
            say(message, sys.stdout, end="")
        else:
            _complain(message, end="")


def make_parser() -> Parser:
    """The parser of the whole command line; ``home`` is the module of the command given."""
    from hsswap.commands import doctor_args, generate_args

    text = "KV caches larger than device memory."
    parser = Parser(prog="hsswap", description=text, epilog=EXIT_STATUS)
    parser.add_argument("--version", action="version", version=f"hsswap {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, text, add_arguments in (
        ("generate", "a real model decodes through the swap", generate_args.add_arguments),
        ("doctor", "what this machine can do, and what is missing", doctor_args.add_arguments),
    ):
        command = commands.add_parser(name, help=text, description=text, epilog=EXIT_STATUS)
        add_arguments(command)
        command.set_defaults(home=f"hsswap.commands.{name}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 fine, 1 failed or wrong result, 2 usage.

    129, 130 and 143 after SIGHUP, Ctrl-C and SIGTERM. Errors made for people are one line on
    stderr. ``argv`` None: the process's own, and the process ends after it.
    """
    interrupts = Interrupts(to_the_end=argv is None)
    try:
        with interrupts:
            open_standard_streams()
            code = _run(argv, interrupts)
            flush_standard_streams()
            return code
    except BaseException as error:
        ending = _ending(interrupts.came or error)
        if ending is None:
            raise
        if ending.message:
            _complain("hsswap: " + " ".join(ending.message.split()))
        silence_standard_streams()
        return ending.code


def _run(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    leave_a_core()
    try:
        options = make_parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else OK
    code: int = import_module(options.home).main(options, interrupts)
    return code


def leave_a_core() -> None:
    """Give BLAS half of the processors, unless the caller has set a number.

    OpenBLAS threads spin while they wait. With as many of them as processors they keep those from
    the threads that read and attend: 2 of 2 made decoding 5 to 10 times slower (measured on 2
    shared cores). It reads the variable when NumPy is first imported, which is after this.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))


class _Ending(NamedTuple):
    """How the command ends: the exit code, and a line for stderr ("" for none)."""

    code: int
    message: str


def _ending(error: BaseException) -> _Ending | None:
    """What an error means for the process; None for one that is a mistake of ours."""
    match error:
        case Interrupted():
            return _Ending(error.exit_code, f"interrupted by {error}; nothing is left behind")
        case KeyboardInterrupt():  # before the handlers were set
            return _Ending(130, "interrupted")
        case OutputError(is_pipe=True):
            return _Ending(FAILED, "")
        case ArgumentError() | ConfigError():
            return _Ending(USAGE, str(error))
        case HsswapError():
            return _Ending(FAILED, str(error))
    return None


def _complain(message: str, end: str = "\n") -> None:
    with suppress(OutputError):  # where nobody can be told, the exit code says it
        say(message, sys.stderr, end=end)


if __name__ == "__main__":
    sys.exit(main())
