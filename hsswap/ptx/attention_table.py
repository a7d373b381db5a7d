"""The kernels of attend and finalize, for the table."""

from __future__ import annotations

from hsswap.ptx.kernel import Kernel

ATTENTION_KERNELS: dict[str, Kernel] = {}
