"""A transfer to or from device memory, cut into the calls that kvikio is given. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ArgumentError
from hsswap.io.base import Operation, Transfer
from hsswap.io.gds_driver import Allocation


class Piece(NamedTuple):
    """Bytes that adjoin in the file, from ``offset``, and in device memory, from ``address``."""

    allocation: Allocation
    address: int
    nbytes: int
    offset: int


def describe(transfer: Transfer) -> str:
    """The beginning of a message about a transfer."""
    verb = "reading" if transfer.operation is Operation.READ else "writing"
    return f"{verb} {transfer.nbytes} bytes at {transfer.offset} of {transfer.file.path}"


def pieces_of(transfer: Transfer, allocation_of: Callable[[int], Allocation | None]) -> list[Piece]:
    """A transfer in as few pieces as can be, in the order of the file; none for host memory.

    ``allocation_of(address)``: the device allocation around it, or None; asked once for each
    allocation in turn. The first address tells whether it is device memory. Raises ArgumentError
    for a span that ends behind its allocation, and for host memory behind a first span in device
    memory. (The other way round the system call fails with EFAULT.)
    """
    addresses, span_bytes = transfer.addresses, transfer.span_bytes
    pieces: list[Piece] = []
    number = 0
    while number < len(addresses):
        address = int(addresses[number])
        allocation = allocation_of(address)
        if allocation is None:
            if not pieces:
                return pieces
            raise ArgumentError(
                f"{describe(transfer)}: its first span is in device memory and the one at "
                f"{address:#x} is not; submit one transfer to each kind of memory"
            )
        count = _count_inside(addresses[number:], span_bytes, allocation)
        if count == 0:
            raise ArgumentError(
                f"{describe(transfer)}: the span of {span_bytes} bytes at {address:#x} ends behind "
                f"its allocation, which ends at {allocation.end:#x}"
            )
        offset = transfer.offset + number * span_bytes
        pieces += _adjoining(addresses[number : number + count], span_bytes, allocation, offset)
        number += count
    return pieces


def _count_inside(addresses: NDArray[np.uint64], span_bytes: int, allocation: Allocation) -> int:
    """How many spans from the first on lie wholly in an allocation."""
    if span_bytes > allocation.nbytes:
        return 0
    first, last = np.uint64(allocation.base), np.uint64(allocation.end - span_bytes)
    inside = (addresses >= first) & (addresses <= last)
    return len(addresses) if inside.all() else int(np.argmin(inside))


def _adjoining(
    addresses: NDArray[np.uint64], span_bytes: int, allocation: Allocation, offset: int
) -> list[Piece]:
    """Spans of one allocation, neighbours joined."""
    jumps = np.flatnonzero(addresses[1:] != addresses[:-1] + np.uint64(span_bytes)) + 1
    begins = [0, *jumps.tolist()]
    ends = [*begins[1:], len(addresses)]
    return [
        Piece(
            allocation,
            int(addresses[begin]),
            (end - begin) * span_bytes,
            offset + begin * span_bytes,
        )
        for begin, end in zip(begins, ends, strict=True)
    ]
