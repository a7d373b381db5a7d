"""What callers hand in, checked before anything changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsswap.appending import Rows
from hsswap.attending import Query
from hsswap.dims import BF16_BYTES
from hsswap.driver.base import Stream
from hsswap.driver.tensor import Tensor, contiguous_strides, tensor_of
from hsswap.e4m3 import E4M3Rows
from hsswap.errors import ArgumentError, shown
from hsswap.exact import LayerCache
from hsswap.pools import GroupPool
from hsswap.tiers import I64

AXES = "[rows, heads, dim]"


def checked_rows(cache: LayerCache, keys: object, values: object) -> Rows:
    """Rows for the end of a layer. Raises ArgumentError for wrong arrays."""
    group = cache.pool.group
    count = leading(keys, "keys")
    if isinstance(keys, E4M3Rows) or isinstance(values, E4M3Rows):
        return Rows(cache, **e4m3_tensors(cache.pool, keys, values, count))
    shape = (count, group.kv_heads)
    rows = Rows(
        cache,
        tensor_of(keys, group.dtype, (*shape, group.head_dim), "keys", axes=AXES),
        tensor_of(values, group.dtype, (*shape, group.value_dim), "values", axes=AXES),
    )
    cache.pool.check_reachable(rows.keys, "keys")
    cache.pool.check_reachable(rows.values, "values")
    return rows


def e4m3_tensors(pool: GroupPool, keys: object, values: object, count: int) -> dict[str, Tensor]:
    """So many rows that are :class:`E4M3Rows`, as an append takes them. Raises ArgumentError."""
    group = pool.group
    if not isinstance(keys, E4M3Rows) or not isinstance(values, E4M3Rows):
        raise ArgumentError("one of keys and values is E4M3Rows and the other is not; give both so")
    if not group.is_e4m3:
        raise ArgumentError(
            f"keys and values are E4M3Rows, and the layer is kept as {group.kv_dtype}; give "
            "LayerGroup(kv_dtype='e4m3'), or keys and values of that type"
        )
    shape = (count, group.kv_heads)
    found = {
        "keys": tensor_of(keys.codes, "e4m3", (*shape, group.head_dim), "keys"),
        "values": tensor_of(values.codes, "e4m3", (*shape, group.value_dim), "values"),
        "key_scales": tensor_of(keys.scales, "f32", shape, "the scales of keys"),
        "value_scales": tensor_of(values.scales, "f32", shape, "the scales of values"),
    }
    for what, tensor in found.items():
        pool.check_reachable(tensor, what)
    return found


@dataclass(frozen=True, slots=True)
class Given:
    """An attend's arrays as the caller gave them; all but ``queries`` may be None."""

    queries: object
    out: object | None
    lse_out: object | None
    sinks: object | None = None


def checked_query(cache: LayerCache, indices: I64, given: Given, stream: Stream) -> Query:
    """An attend's arguments, ``out`` made if it is None. Raises ArgumentError for wrong arrays and
    for more rows than the layer has tokens.
    """
    group = cache.pool.group
    count = leading(given.queries, "queries")
    if count > cache.length:
        raise ArgumentError(
            f"{count} query rows for layer {cache.layer}, which has {cache.length} tokens; append "
            "the rows' keys and values first"
        )
    shape = (count, group.q_heads, group.head_dim)
    taken = tensor_of(given.queries, group.dtype, shape, "queries", axes=AXES)
    shape = (count, group.q_heads, group.value_dim)
    out = cache.pool.new_output(shape) if given.out is None else given.out
    taken_out = tensor_of(out, group.dtype, shape, "out", axes=AXES, written=True)
    lse = None
    if given.lse_out is not None:
        lse = tensor_of(given.lse_out, "f32", (count, group.q_heads), "lse_out", written=True)
        cache.pool.check_reachable(lse, "lse_out")
    sinks = None
    if given.sinks is not None:
        sinks = tensor_of(given.sinks, "f32", (group.q_heads,), "sinks")
        cache.pool.check_reachable(sinks, "sinks")
    cache.pool.check_reachable(taken, "queries")
    cache.pool.check_reachable(taken_out, "out")
    return Query(cache, indices, taken, taken_out, out, stream, lse, sinks)


def checked_length(length: object, longest: int, *, what: str = "length", least: int = 0) -> int:
    """A number of tokens from ``least`` to ``longest``. Raises ArgumentError naming ``what``."""
    whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
    if not whole or not least <= length <= longest:  # type: ignore[operator]
        raise ArgumentError(
            f"{what} is {shown(length)}; give a whole number from {least} to {longest}"
        )
    return int(length)  # type: ignore[call-overload, no-any-return]


def checked_choice(value: object, what: str) -> bool | None:
    """True, False or None, NumPy's too. Raises ArgumentError naming ``what``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise ArgumentError(f"{what} is {shown(value)}; give True, False or None")


def checked_layer(layer: object, layers: int) -> int:
    """A layer of the model. Raises ArgumentError."""
    whole = isinstance(layer, int | np.integer) and not isinstance(layer, bool)
    if not whole or not 0 <= layer < layers:  # type: ignore[operator]
        raise ArgumentError(f"layer is {shown(layer)}; it must be 0 to {layers - 1}")
    return int(layer)  # type: ignore[call-overload, no-any-return]


def block_tensor(
    given: object | None,
    shape: tuple[int, int, int],
    strides: tuple[int, int, int] | None,
    pool: GroupPool,
    what: str,
    *,
    written: bool = False,
) -> Tensor:
    """That shape of the layer group's dtype, from an array or a pointer into the device's memory.

    A pointer is an int, with ``strides`` in bytes (None: contiguous). An array may lack a first
    axis of 1. Raises ArgumentError.
    """
    dtype = pool.group.dtype
    if given is None:
        raise ArgumentError(f"{what} is given neither on the device nor in host memory")
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        address = int(given)
        steps = contiguous_strides(shape, BF16_BYTES) if strides is None else strides
        if not _are_strides(steps):
            raise ArgumentError(
                f"strides of {what} are {shown(strides)}; give 3 even numbers of bytes"
            )
        if not 0 < address < 1 << 63 or address % BF16_BYTES:
            raise ArgumentError(
                f"{what} is {shown(address)}; a device pointer to {dtype} is needed"
            )
        return Tensor(address, shape, tuple(steps), dtype, pool.device_memory.on_device, None)
    if strides is not None:
        raise ArgumentError(f"strides of {what} go with a pointer; an array has its own")
    flat = shape[0] == 1 and len(getattr(given, "shape", ())) == 2
    tensor = tensor_of(given, dtype, shape[1:] if flat else shape, what, written=written)
    pool.check_reachable(tensor, what)
    return tensor.as_batch() if flat else tensor


def _are_strides(steps: object) -> bool:
    """Whether these are the strides of three axes of BF16."""
    three = isinstance(steps, tuple | list) and len(steps) == 3
    return three and all(
        isinstance(step, int | np.integer)
        and not step % BF16_BYTES
        and -(1 << 63) <= step < 1 << 63
        for step in steps  # type: ignore[attr-defined]
    )


def leading(array: object, what: str) -> int:
    """The number of rows of an argument. Raises ArgumentError when it has none."""
    shape = getattr(array, "shape", None)
    if not isinstance(shape, tuple) or not all(isinstance(n, int | np.integer) for n in shape):
        raise ArgumentError(
            f"{what} is a {type(array).__name__}; give an array {AXES} of BF16 codes"
        )
    if len(shape) != 3 or shape[0] < 1:
        raise ArgumentError(f"{what} has shape {shape}; give {AXES} with 1 row or more")
    return int(shape[0])
