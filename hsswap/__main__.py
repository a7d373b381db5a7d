"""The command ``hsswap``. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from hsswap import __version__
from hsswap.commands.interrupts import Interrupted, Interrupts
from hsswap.errors import ArgumentError, ConfigError, HsswapError

OK, FAILED, USAGE = 0, 1, 2


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line like all others."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave with 2."""
        self.exit(USAGE, f"hsswap: {message}; see {self.prog} --help\n")


def make_parser() -> Parser:
    """The parser of the whole command line; ``home`` is the module of the command given."""
    from hsswap.commands import doctor_args, generate_args

    parser = Parser(prog="hsswap", description="KV caches larger than device memory.")
    parser.add_argument("--version", action="version", version=f"hsswap {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, text, add_arguments in (
        ("generate", "a real model decodes through the swap", generate_args.add_arguments),
        ("doctor", "what this machine can do, and what is missing", doctor_args.add_arguments),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.set_defaults(home=f"hsswap.commands.{name}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 fine, 1 failed or wrong result, 2 usage.

    130 and 143 after Ctrl-C and SIGTERM. Errors made for people are one line on stderr.
    """
    try:
        with Interrupts() as interrupts:
            options = make_parser().parse_args(argv)
            leave_a_core()
            code: int = import_module(options.home).main(options, interrupts)
            return code
    except SystemExit as stop:  # argparse
        return stop.code if isinstance(stop.code, int) else OK
    except Interrupted as stop:
        return _fail(f"interrupted by {stop}; nothing is left behind", stop.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (ArgumentError, ConfigError) as error:
        return _fail(str(error), USAGE)
    except HsswapError as error:
        return _fail(str(error), FAILED)
    except BrokenPipeError:
        # Python would flush what is left at exit, and complain.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def leave_a_core() -> None:
    """Give BLAS half of the processors, unless the caller has set a number.

    OpenBLAS threads spin while they wait. With as many of them as processors they keep those from
    the threads that read and attend: 2 of 2 made decoding 5 to 10 times slower (measured on 2
    shared cores). It reads the variable when NumPy is first imported, which is after this.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))


def _fail(message: str, code: int) -> int:
    with suppress(BrokenPipeError):
        print("hsswap: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
