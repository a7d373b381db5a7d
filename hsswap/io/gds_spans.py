"""Short reads into device memory: side by side on kvikio's pool, or one after the other here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hsswap.errors import ArgumentError, HsswapError
from hsswap.io.base import IOFile, SpanReads
from hsswap.io.counted import EndedSpans
from hsswap.io.gds_driver import Allocation
from hsswap.io.gds_kvikio import KVIKIO_ERRORS, CuFile, DeviceBuffer
from hsswap.io.gds_pieces import failure
from hsswap.io.posix import describe_span, span_error

AllocationOf = Callable[[int], Allocation | None]


def read_on_pool(
    reads: SpanReads,
    numbers: list[int],
    cufiles: Mapping[IOFile, CuFile],
    allocation_of: AllocationOf,
) -> list[EndedSpans]:
    """Read spans on kvikio's threads, and wait for all: they use files and memory. Returns those
    that failed.
    """
    failed: list[EndedSpans] = []
    pending = []
    for number in numbers:
        try:
            _allocation(reads, number, allocation_of)
            buffer = DeviceBuffer(reads.addresses[number], reads.span_bytes)
            cufile = cufiles[reads.files[number]]
            future = cufile.pread(buffer, reads.span_bytes, reads.offsets[number])
            pending.append((number, future, buffer))  # the future does not keep the buffer
        except (HsswapError, *KVIKIO_ERRORS) as error:
            failed.append(_failed(reads, number, error))
    for number, future, _ in pending:
        try:
            moved = future.get()
        except KVIKIO_ERRORS as error:
            failed.append(_failed(reads, number, error))
        else:
            if moved < reads.span_bytes:
                failed.append((reads, [number], span_error(reads, number, moved)))
    return failed


def read_here(
    reads: SpanReads,
    numbers: list[int],
    cufiles: Mapping[IOFile, CuFile],
    allocation_of: AllocationOf,
    make_current: Callable[[int], None],
) -> list[EndedSpans]:
    """Read spans in this thread, by GPUDirect. Returns those that failed."""
    failed: list[EndedSpans] = []
    for number in numbers:
        try:
            base, nbytes, context = _allocation(reads, number, allocation_of)
            make_current(context)
            # The allocation's base and an offset: what was registered is found by its base.
            moved = cufiles[reads.files[number]].raw_read(
                DeviceBuffer(base, nbytes),
                reads.span_bytes,
                reads.offsets[number],
                reads.addresses[number] - base,
            )
        except (HsswapError, *KVIKIO_ERRORS) as error:
            failed.append(_failed(reads, number, error))
        else:
            if moved < reads.span_bytes:
                failed.append((reads, [number], span_error(reads, number, moved)))
    return failed


def _allocation(reads: SpanReads, number: int, allocation_of: AllocationOf) -> Allocation:
    """The allocation that a span lies in. Raises ArgumentError where there is none."""
    address = reads.addresses[number]
    found = allocation_of(address)
    if found is None or address + reads.span_bytes > found.end:
        raise ArgumentError(
            f"{describe_span(reads, number)}: {address:#x} is not device memory, as the first span "
            "is, or ends behind its allocation"
        )
    return found


def _failed(reads: SpanReads, number: int, error: Exception) -> EndedSpans:
    if isinstance(error, HsswapError):
        return reads, [number], error
    return reads, [number], failure(error, describe_span(reads, number))
