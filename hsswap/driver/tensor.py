"""Raw memory with a shape: what operations take, whoever allocated it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hsswap.driver.dlpack import exported
from hsswap.errors import ArgumentError, ClosedError

# BF16 and E4M3 have no NumPy dtype; they travel as their codes (hsswap.bf16, hsswap.e4m3).
_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "f16": np.dtype(np.float16),
    "e4m3": np.dtype(np.uint8),
    "f32": np.dtype(np.float32),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
    "u32": np.dtype(np.uint32),
}


class Memory(Protocol):
    """Anything with an address: a :class:`~hsswap.driver.base.Buffer`, for one."""

    address: int
    nbytes: int
    on_device: bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """``shape`` elements of ``dtype`` from ``address`` on, ``strides`` bytes apart.

    ``dtype`` is one of bf16, f16, e4m3, f32, i32, i64, u8, u32. ``owner`` keeps the memory alive.
    ``on_device`` is false for memory that the CPU may touch.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    on_device: bool
    owner: object

    def array(self) -> NDArray[Any]:
        """A NumPy view of the memory. Raises ArgumentError for memory of a GPU, ClosedError for a
        buffer that was closed.
        """
        if self.on_device:
            raise ArgumentError("the tensor is in a GPU's memory; the host device cannot read it")
        if isinstance(self.owner, np.ndarray):
            return self.owner
        owner = self.owner
        while isinstance(owner, Tensor):
            owner = owner.owner
        if getattr(owner, "closed", False) is True:
            raise ClosedError(
                f"{self.dtype} {self.shape} is in a buffer that was closed; a graph over captured "
                "steps, for one, is of no use after their block"
            )
        return _view(self.address, self.shape, self.strides, self.dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` (exclusive) along the first axis."""
        shape = (stop - start, *self.shape[1:])
        address = self.address + start * self.strides[0]
        return Tensor(address, shape, self.strides, self.dtype, self.on_device, self)

    def every(self, step: int, first: int, count: int) -> Tensor:
        """``count`` elements along the first axis, ``step`` apart, from ``first`` on."""
        address = self.address + first * self.strides[0]
        strides = (step * self.strides[0], *self.strides[1:])
        shape = (count, *self.shape[1:])
        return Tensor(address, shape, strides, self.dtype, self.on_device, self)

    def row(self, index: int) -> Tensor:
        """One element along the first axis, that axis gone."""
        address = self.address + index * self.strides[0]
        return Tensor(address, self.shape[1:], self.strides[1:], self.dtype, self.on_device, self)

    def as_batch(self) -> Tensor:
        """The same memory with a leading axis of one."""
        shape = (1, *self.shape)
        strides = (0, *self.strides)
        return Tensor(self.address, shape, strides, self.dtype, self.on_device, self)


# A view of raw memory owns nothing, so an old one of the same key is as good as a new one. Making
# it takes 5 us, and an operation needs up to ten; 4,096 of them are under 2 MiB.
@lru_cache(maxsize=4096)
def _view(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype_name: str
) -> NDArray[Any]:
    dtype = _DTYPES[dtype_name]
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    before = -sum(min(r, 0) for r in reach)  # bytes in front of the first element: reversed axes
    nbytes = before + sum(max(r, 0) for r in reach) + dtype.itemsize
    raw: Any = (ctypes.c_char * nbytes).from_address(address - before)
    return np.ndarray(shape, dtype, raw, offset=before, strides=strides)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbours along each axis of a C-contiguous array."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def tensor_in(
    memory: Memory, dtype: str, shape: tuple[int, ...], *, offset_bytes: int = 0
) -> Tensor:
    """A C-contiguous tensor inside a buffer.

    Raises ArgumentError when it does not fit or the offset is not a multiple of the item size.
    """
    itemsize = _DTYPES[dtype].itemsize
    strides = contiguous_strides(shape, itemsize)
    nbytes = prod(shape) * itemsize
    if offset_bytes < 0 or offset_bytes % itemsize or offset_bytes + nbytes > memory.nbytes:
        raise ArgumentError(
            f"{dtype} {shape} at byte {offset_bytes} does not fit a buffer of {memory.nbytes} bytes"
        )
    return Tensor(memory.address + offset_bytes, shape, strides, dtype, memory.on_device, memory)


def tensor_of(
    obj: object,
    dtype: str,
    shape: tuple[int, ...],
    what: str,
    *,
    axes: str = "",
    written: bool = False,
) -> Tensor:
    """Take an engine's array: a NumPy array, a :class:`Tensor`, or an object with ``__dlpack__`` or
    ``__cuda_array_interface__``.

    ``shape`` is what it must have; ``what`` names it in errors, ``axes`` what these mean
    ("[rows, heads, dim]"). BF16 comes as 16-bit integers,
    E4M3 as 8-bit ones.
    ``written``: work will write to it. Raises ArgumentError for another kind of object, dtype or
    shape, and for an array that is to be written and is read-only or overlaps itself, before
    anything is touched.
    """
    if isinstance(obj, Tensor):
        tensor = obj
        if tensor.dtype != dtype:
            raise ArgumentError(f"{what} has dtype {tensor.dtype}; {dtype} is needed")
    elif isinstance(obj, np.ndarray):
        _check_dtype(obj.dtype, dtype, what)
        if written and not obj.flags.writeable:
            raise ArgumentError(f"{what} is read-only; give an array that can be written")
        tensor = Tensor(obj.ctypes.data, obj.shape, obj.strides, dtype, False, obj)
    elif hasattr(obj, "__dlpack__"):
        address, dims, steps, on_device, owner = exported(obj, dtype, what)
        tensor = Tensor(address, dims, steps, dtype, on_device, owner)
    elif hasattr(obj, "__cuda_array_interface__"):
        tensor = _from_cuda_interface(obj, dtype, what, written)
    else:
        raise ArgumentError(
            f"{what} is a {type(obj).__name__}; a NumPy array or an object with __dlpack__ or "
            "__cuda_array_interface__ is needed"
        )
    if tensor.shape != shape:
        meaning = f", {axes}" if axes else ""
        raise ArgumentError(f"{what} has shape {tensor.shape}; {shape} is needed{meaning}")
    if written and _overlaps(tensor):
        raise ArgumentError(
            f"{what} has strides {tensor.strides}, with which elements share bytes; give an array "
            "of its own for each row (not an expanded or broadcast one)"
        )
    return tensor


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements may share bytes: an axis steps into what shorter steps cover."""
    covered = _DTYPES[tensor.dtype].itemsize
    for step, count in sorted(zip(map(abs, tensor.strides), tensor.shape, strict=True)):
        if count > 1 and step < covered:
            return True
        covered += step * (count - 1)
    return False


def _check_dtype(given: DTypeLike, dtype: str, what: str) -> None:
    wanted = _DTYPES[dtype]
    # torch gives the bits of its BF16 tensors to NumPy as int16.
    kinds = (wanted, np.dtype(np.int16)) if dtype == "bf16" else (wanted,)
    if np.dtype(given) not in kinds:
        hint = " (BF16 as 16-bit codes: hsswap.bf16.from_float32)" if dtype == "bf16" else ""
        raise ArgumentError(f"{what} has dtype {np.dtype(given)}; {wanted} is needed{hint}")


def _from_cuda_interface(obj: object, dtype: str, what: str, written: bool) -> Tensor:
    try:
        facts: dict[str, Any] = obj.__cuda_array_interface__  # type: ignore[attr-defined]
        address, read_only = facts["data"]
        given, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
        strides = facts.get("strides") or contiguous_strides(shape, _DTYPES[dtype].itemsize)
        tensor = Tensor(int(address), shape, tuple(strides), dtype, True, obj)
    except Exception as error:  # of any framework
        raise ArgumentError(f"{what} has no __cuda_array_interface__ to read: {error!r}") from error
    if written and read_only:
        raise ArgumentError(f"{what} is read-only; give an array that can be written")
    # Frameworks without a BF16 type string give 2-byte voids or integers for it.
    if not (dtype == "bf16" and given.itemsize == 2 and given.kind in "iuV"):
        _check_dtype(given, dtype, what)
    return tensor
