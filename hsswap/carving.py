"""Tensors inside one buffer, and smaller ones inside a tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hsswap.driver.base import Buffer
from hsswap.driver.tensor import Tensor, tensor_in


def carve(
    allocate: Callable[[int], Buffer], shapes: dict[str, tuple[str, tuple[int, ...]]]
) -> tuple[Buffer, dict[str, Tensor]]:
    """One buffer with a tensor for each name, each 64-byte aligned."""
    offsets: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        offsets[name] = end
        itemsize = 1 if dtype == "u8" else 4
        end += -(-int(np.prod(shape)) * itemsize // 64) * 64
    buffer = allocate(end)
    return buffer, {
        name: tensor_in(buffer, dtype, shape, offset_bytes=offsets[name])
        for name, (dtype, shape) in shapes.items()
    }


def first_of(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of a contiguous tensor in another, smaller contiguous shape."""
    return tensor_in(_Span(tensor), tensor.dtype, shape)


def first_columns(tensor: Tensor, count: int) -> Tensor:
    """The first columns of a matrix."""
    shape = (tensor.shape[0], count)
    return Tensor(tensor.address, shape, tensor.strides, tensor.dtype, tensor.on_device, tensor)


def words_of(tensor: Tensor) -> Tensor:
    """The same memory as int32."""
    return Tensor(
        tensor.address, tensor.shape, tensor.strides, "i32", tensor.on_device, tensor.owner
    )


class _Span:
    """A contiguous tensor's memory, to carve a smaller one from."""

    def __init__(self, tensor: Tensor) -> None:
        self.address = tensor.address
        self.nbytes = tensor.shape[0] * tensor.strides[0]
        self.on_device = tensor.on_device
        self.tensor = tensor
