"""Whether a GPU can reach the tensors of a record, before a kernel faults on one.

A fault would cost the whole context. Reachable: device memory; host memory that a device pinned
(:class:`MappedBuffer`, or another library's, which the driver is asked about). Small inputs in
ordinary NumPy arrays are copied when the work is enqueued; results cannot be written there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, reduce
from operator import or_
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.check_parts import named_tensors, root_owner, tensors_of
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_memory import MappedBuffer
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.errors import ArgumentError

W = TypeVar("W")

INPUTS = frozenset(
    {
        *("keys", "values", "key_scales", "value_scales", "queries", "sinks"),
        *("scores", "last_chosen", "last_mass", "source"),
    }
)
"""Fields of records that are only read, and may be copied. Scores: of select; score writes its."""

ITEM_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "f32": 4, "i32": 4, "i64": 8, "u8": 1, "u32": 4}


def make_reachable(
    context: Context,
    work: W,
    upload: Callable[[NDArray[Any]], int] | None,
    *,
    outputs: tuple[str, ...] = (),
) -> W:
    """``work`` with its ordinary arrays replaced by uploaded copies.

    ``outputs``: names in ``INPUTS`` that this record writes. Raises ArgumentError for what the GPU
    cannot reach, and for memory that is not aligned to its items. ``upload`` None: nothing may be
    copied, since a graph would read the copy at every launch. The context must be current.
    """
    if is_reachable(work):
        return work
    changes: dict[str, Tensor] = {}
    for what, tensor in named_tensors(work):
        item = ITEM_BYTES[tensor.dtype]
        if (tensor.address | _bits_of(tensor.strides)) & (item - 1):
            raise ArgumentError(f"{what} is not aligned to its items of {item} bytes")
        if tensor.on_device or 0 in tensor.shape:
            continue
        owner = root_owner(tensor)
        if type(owner) is MappedBuffer or _is_pinned(context, tensor):
            continue
        if what not in INPUTS or what in outputs or upload is None:
            raise ArgumentError(
                f"{what} is in host memory that {context.name} cannot reach; use memory of the "
                "GPU, or pinned memory (Device.allocate_host)"
            )
        array = np.ascontiguousarray(tensor.array())
        strides = contiguous_strides(tensor.shape, item)
        changes[what] = Tensor(upload(array), tensor.shape, strides, tensor.dtype, True, owner)
    return replace(work, **changes) if changes else work  # type: ignore[type-var]


def is_reachable(work: object) -> bool:
    """Whether all tensors of a record are aligned, and of the GPU or pinned by the device."""
    return all(map(_is_reachable, tensors_of(work, [])))


def _is_reachable(tensor: Tensor) -> bool:
    """Whether nothing more needs to be asked: aligned, and of the GPU or pinned by the device."""
    if (tensor.address | _bits_of(tensor.strides)) & (ITEM_BYTES[tensor.dtype] - 1):
        return False
    if tensor.on_device:
        return True
    owner = tensor.owner
    while type(owner) is Tensor:
        owner = owner.owner
    return type(owner) is MappedBuffer


@lru_cache(maxsize=4096)
def _bits_of(strides: tuple[int, ...]) -> int:
    """The bits that some stride has."""
    return reduce(or_, strides, 0)


def _is_pinned(context: Context, tensor: Tensor) -> bool:
    driver = context.driver
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    status, seen = driver.cuPointerGetAttribute(kind, tensor.address)
    return not status and int(seen) == tensor.address
