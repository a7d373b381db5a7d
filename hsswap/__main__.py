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
    """argparse, with errors of one line like all others, and options by their whole names: a
    beginning would mean another option as soon as there is one more.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave with 2."""
        self.exit(USAGE, f"hsswap: {message}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse keeps to itself that help could not be written.
        if file is sys.stdout:
            say(message, sys.stdout, end="")
        else:
            _complain(message, end="")


class Command(NamedTuple):
    """A command: ``home`` has ``main(options, interrupts) -> int``, ``arguments`` (a module)
    ``add_arguments(parser)``.
    """

    name: str
    text: str
    home: str
    arguments: str


COMMANDS = (
    Command(
        "generate",
        "a real model decodes through the swap",
        "hsswap.commands.generate",
        "hsswap.commands.generate_args",
    ),
    Command(
        "doctor",
        "what this machine can do, and what is missing",
        "hsswap.commands.doctor",
        "hsswap.commands.doctor_args",
    ),
    Command(
        "fsck",
        "check every block of a persistent store",
        "hsswap.commands.fsck",
        "hsswap.commands.fsck",
    ),
)

BENCHES = (
    Command(
        "io",
        "blocks from a drive, beside plain readers",
        "hsswap.bench.io",
        "hsswap.bench.io",
    ),
    Command(
        "attention",
        "attention on a GPU, beside torch's",
        "hsswap.bench.attention",
        "hsswap.bench.attention",
    ),
    Command(
        "overlap",
        "whether reads hide behind compute, and what the public call costs",
        "hsswap.bench.overlap",
        "hsswap.bench.overlap",
    ),
    Command(
        "decode",
        "a decode step with a cache beyond the GPU's, beside dense attention and other ways",
        "hsswap.bench.decode",
        "hsswap.bench.decode",
    ),
    Command(
        "rounds",
        "speculative rounds ahead of the host, beside one read-back a round",
        "hsswap.bench.rounds",
        "hsswap.bench.rounds",
    ),
    Command(
        "predictor",
        "which blocks a predictor finds, on a real model, beside other rules",
        "hsswap.bench.predictor",
        "hsswap.bench.predictor",
    ),
)


def make_parser(words: Sequence[str]) -> Parser:
    """The parser for a command line of these words; ``home`` is the module of the command given.

    Only a command that is named has its arguments added: their modules can be slow to import.
    """
    text = "KV caches larger than device memory."
    parser = Parser(prog="hsswap", description=text, epilog=EXIT_STATUS)
    parser.add_argument("--version", action="version", version=f"hsswap {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    _add_commands(commands, COMMANDS, words[:1])
    text = "figures with their machine, date and commit, beside baselines of the same run"
    bench = commands.add_parser("bench", help=text, description=text, epilog=EXIT_STATUS)
    _add_commands(
        bench.add_subparsers(required=True, metavar="what", dest="what"), BENCHES, words[1:2]
    )
    return parser


def _add_commands(parsers: Any, commands: Sequence[Command], named: Sequence[str]) -> None:
    for command in commands:
        parser = parsers.add_parser(
            command.name, help=command.text, description=command.text, epilog=EXIT_STATUS
        )
        if command.name in named:
            import_module(command.arguments).add_arguments(parser)
        parser.set_defaults(home=command.home)


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
        words = sys.argv[1:] if argv is None else argv
        options = make_parser(words).parse_args(words)
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
            # Of a device the remedy is a setting, which the command has as an option.
            return _Ending(FAILED, str(error).replace('device="host"', "--device host"))
        case MemoryError():
            what = str(error) or "no more can be had"
            return _Ending(FAILED, f"memory: {what}; free some, or take a smaller model")
    return None


def _complain(message: str, end: str = "\n") -> None:
    with suppress(OutputError):  # where nobody can be told, the exit code says it
        say(message, sys.stderr, end=end)


if __name__ == "__main__":
    sys.exit(main())
