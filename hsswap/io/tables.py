"""Tables with an entry for every block that a store could hold; few of them are ever touched."""

from __future__ import annotations

import mmap
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ConfigError

Scalar = TypeVar("Scalar", bound=np.generic)

FEW = 64
"""Of so many numbers a list is quicker than NumPy: a reduction costs 1 us, ``table[row, numbers]``
0.9 where ``table[row][numbers]`` takes 0.2, a list of 16 and its minimum 0.4."""

MAP_NORESERVE = 0x4000
"""Of linux/mman.h on x86-64 and AArch64; Python's mmap has no name for it before 3.13."""


def sparse_zeros(shape: tuple[int, ...], dtype: type[Scalar]) -> NDArray[Scalar]:
    """An array of zeros that takes memory only where it is touched, by pages.

    Unlike ``np.zeros`` also where all of it would be more than the machine has. Raises ConfigError
    where the system refuses that (``vm.overcommit_memory`` 2, or no addresses left).
    """
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory: Any = mmap.mmap(-1, max(1, nbytes), flags=flags)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"a table of {nbytes} bytes for the blocks of the store cannot be had ({error}); lower "
            "its capacity"
        ) from error
    return np.frombuffer(memory, dtype, prod(shape)).reshape(shape)
