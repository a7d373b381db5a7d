"""What callers hand in, checked before anything changes."""

from __future__ import annotations

import numpy as np

from hsswap.appending import Rows
from hsswap.attending import Query
from hsswap.driver.base import Stream
from hsswap.driver.tensor import tensor_of
from hsswap.errors import ArgumentError
from hsswap.exact import LayerCache
from hsswap.tiers import I64


def checked_rows(cache: LayerCache, keys: object, values: object) -> Rows:
    """Rows for the end of a layer. Raises ArgumentError for wrong arrays."""
    group = cache.pool.group
    count = leading(keys, "keys")
    rows = Rows(
        cache,
        tensor_of(keys, "bf16", (count, group.kv_heads, group.head_dim), "keys"),
        tensor_of(values, "bf16", (count, group.kv_heads, group.value_dim), "values"),
    )
    cache.pool.check_reachable(rows.keys, "keys")
    cache.pool.check_reachable(rows.values, "values")
    return rows


def checked_query(
    cache: LayerCache, indices: I64, queries: object, out: object | None, stream: Stream
) -> Query:
    """An attend's arguments, ``out`` made if it is None. Raises ArgumentError for wrong arrays and
    for more rows than the layer has tokens.
    """
    group = cache.pool.group
    count = leading(queries, "queries")
    if count > cache.length:
        raise ArgumentError(
            f"{count} query rows for layer {cache.layer}, which has {cache.length} tokens; append "
            "the rows' keys and values first"
        )
    taken = tensor_of(queries, "bf16", (count, group.q_heads, group.head_dim), "queries")
    shape = (count, group.q_heads, group.value_dim)
    if out is None:
        out = cache.pool.new_output(shape)
    taken_out = tensor_of(out, "bf16", shape, "out", written=True)
    cache.pool.check_reachable(taken, "queries")
    cache.pool.check_reachable(taken_out, "out")
    return Query(cache, indices, taken, taken_out, out, stream)


def checked_length(length: object, longest: int) -> int:
    """A number of tokens from 0 to ``longest``. Raises ArgumentError."""
    whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
    if not whole or not 0 <= length <= longest:  # type: ignore[operator]
        raise ArgumentError(f"length is {length!r}; give a whole number from 0 to {longest}")
    return int(length)  # type: ignore[call-overload, no-any-return]


def leading(array: object, what: str) -> int:
    """The number of rows of an argument. Raises ArgumentError when it has none."""
    shape = getattr(array, "shape", None)
    if not isinstance(shape, tuple):
        raise ArgumentError(
            f"{what} is a {type(array).__name__}; give an array [rows, heads, dim] of BF16 codes"
        )
    if len(shape) != 3 or shape[0] < 1:
        raise ArgumentError(f"{what} has shape {shape}; give [rows, heads, dim] with 1 row or more")
    return int(shape[0])
