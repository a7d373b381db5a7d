"""The kernels: CUDA C++ sources that NVRTC compiles, and the table that names them.

A kernel's *constants* become ``-D`` options; every set of constants is a module of its own. Files
include ``common.cuh`` of this folder and, only where they must, CUDA headers in angle brackets.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from hsswap.ptx.attention_table import ATTENTION_KERNELS
from hsswap.ptx.kernel import Constants, Kernel

__all__ = ["KERNELS", "Constants", "Kernel", "source"]

KERNELS: dict[str, Kernel] = {**ATTENTION_KERNELS}
"""By name."""


@cache
def source(file: str) -> str:
    """The text of a file of this folder."""
    return (files("hsswap.ptx") / file).read_text(encoding="utf-8")
