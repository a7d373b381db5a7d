"""What the table of kernels says of one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Constants = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: ``file`` in this folder, ``entry`` its ``extern "C"`` name.

    ``examples``: sets of the -D constants it needs, which tests compile it with; one empty set for
    a kernel without constants. ``no_spills``: ptxas must report no spills and no stack frame for
    them (a test checks).
    """

    file: str
    entry: str
    no_spills: bool = False
    examples: tuple[Constants, ...] = ({},)
