"""The kernels: CUDA C++ sources that NVRTC compiles, and the table that names them.

A kernel's *constants* become ``-D`` options; every set of constants is a module of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: ``file`` in this folder, ``entry`` its ``extern "C"`` name.

    ``constants``: the names it needs as -D options, in the order of their meaning in the file.
    ``no_spills``: ptxas must report neither spills nor a stack frame (a test checks). ``examples``:
    values of the constants that tests compile it with.
    """

    file: str
    entry: str
    constants: tuple[str, ...] = ()
    no_spills: bool = False
    examples: tuple[tuple[int, ...], ...] = ((),)


KERNELS: dict[str, Kernel] = {}
"""By name. An operation may use several."""


@cache
def source(file: str) -> str:
    """The text of a file of this folder."""
    return (files("hsswap.ptx") / file).read_text(encoding="utf-8")
