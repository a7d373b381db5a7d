"""The kernels: CUDA C++ sources that NVRTC compiles, and the table that names them.

A kernel's *constants* become ``-D`` options; every set of constants is a module of its own. Files
include ``common.cuh`` of this folder and, only where they must, CUDA headers in angle brackets.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from hsswap.ptx.attention_table import ATTENTION_KERNELS
from hsswap.ptx.kernel import Constants, Kernel

__all__ = ["KERNELS", "Constants", "Kernel", "included_files", "source"]

# Bytes of one access: 16 where every address and stride divides by it.
_BY_ALIGNMENT: tuple[Constants, ...] = ({"CHUNK": 16}, {"CHUNK": 2})
_BY_UNITS: tuple[Constants, ...] = (*_BY_ALIGNMENT, {"CHUNK": 16, "E4M3": 1})

KERNELS: dict[str, Kernel] = {
    "append": Kernel("append.cu", "append", True, _BY_ALIGNMENT),
    "append_at": Kernel("append.cu", "append_at", True, _BY_ALIGNMENT),
    "append_e4m3": Kernel("append_e4m3.cu", "append_e4m3", True, ({}, {"FP16": 1})),
    "append_at_e4m3": Kernel("append_e4m3.cu", "append_at_e4m3", True, ({}, {"FP16": 1})),
    "gather": Kernel("gather.cu", "gather", True, _BY_ALIGNMENT),
    "scatter": Kernel("gather.cu", "scatter", True, _BY_ALIGNMENT),
    "copy_words": Kernel("copy.cu", "copy_words", True),
    "checksum": Kernel("checksum.cu", "checksum", True),
    "encode": Kernel("encode.cu", "encode", False, _BY_UNITS),
    # CHUNK: codes of one load.
    "project": Kernel("score.cu", "project", True, ({"CHUNK": 8}, {"CHUNK": 1})),
    "score": Kernel("score.cu", "score", True, ({"CHUNK": 8}, {"CHUNK": 1})),
    "score_tiled": Kernel(
        "score_tiled.cu", "score_tiled", True, ({"RANK": 32, "DIM": 128}, {"RANK": 128, "DIM": 64})
    ),
    "codes_encode": Kernel("codes_encode.cu", "codes_encode", True, _BY_UNITS),
    "codes_mass": Kernel("codes_mass.cu", "codes_mass", True, _BY_UNITS),
    "codes_mass_any": Kernel("codes_mass_any.cu", "codes_mass_any", True, _BY_UNITS),
    "codes_rank": Kernel("codes_rank.cu", "codes_rank", True),
    "select": Kernel("select.cu", "select", True),
    "trim": Kernel("trim.cu", "trim", True),
    "select_few": Kernel(
        "select_few.cu",
        "select_few",
        True,
        ({"THREADS": 512, "KEYS": 4}, {"THREADS": 512, "KEYS": 8}, {"THREADS": 512, "KEYS": 16}),
    ),
    "fetch": Kernel("fetch.cu", "fetch", True, _BY_ALIGNMENT),
    "assemble": Kernel("rounds.cu", "assemble", True),
    "round_end": Kernel("rounds.cu", "round_end", True),
    **{
        name: Kernel("round_words.cu", name, True)
        for name in ("pack_tok_p", "tok_map", "token_ring", "iota", "set_word", "ngram")
    },
    "running": Kernel("round_running.cu", "running", True),
    "argmax": Kernel("round_rows.cu", "argmax", True),
    "sample": Kernel("round_sample.cu", "sample", True),
    "reject": Kernel("round_sample.cu", "reject", True),
    **ATTENTION_KERNELS,
}
"""By name."""


@cache
def source(file: str) -> str:
    """The text of a file of this folder."""
    return (files("hsswap.ptx") / file).read_text(encoding="utf-8")


def included_files(text: str) -> tuple[str, ...]:
    """The files of this folder that a source includes, and those that these include."""
    found: dict[str, None] = {}
    todo = [text]
    while todo:
        for name in re.findall(r'^\s*#include\s+"([^"]+)"', todo.pop(), re.MULTILINE):
            if name not in found:
                found[name] = None
                todo.append(source(name))
    return tuple(found)
