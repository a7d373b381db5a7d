"""Proof of every attention output, by code of its own: float64, from K and V kept here.

Nothing of this file is shared with a device or with the swap, beyond the dims: not the blocks, not
the order of the sums, not the converters of formats. K and V are kept rounded as the swap rounds
them, and that rounding is reported beside. For each call there are three results:

* ``oracle``: dense attention in float64 over exactly the tokens that each row may see;
* ``reference``: what promise 1 compares with: float32 logits and softmax, P rounded to BF16, PV in
  float32, output rounded to BF16;
* ``ours``: what the swap gave.

With ``error(x) = |x - oracle| / |oracle|`` (L2 over all elements of a call) the promise is

    error(ours) <= 1.5 * max(error(reference), 2**-9)

Each row of a call is held to a wider limit too (``ROW_SLACK``), so that one broken row does not
hide among 255 good ones. A top-k call is compared over exactly the blocks that were chosen and the
block being filled; what the choice itself left out is reported beside it, against the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsswap.commands.verify_formats import F32, U16, kept_rows, round_to_bf16, widen
from hsswap.config import LayerGroup, ModelDims
from hsswap.errors import ArgumentError, VerifyError

F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]

PROMISE_FACTOR = 1.5
"""How far our error may exceed the reference's (ARCHITECTURE.md, promise 1)."""

ERROR_FLOOR = 2.0**-9
"""Half a unit in the last place of BF16: no output in that format can be held to less."""

ROW_SLACK = 3.0
"""A single row may exceed the promise by this factor: a row's own error scatters around the call's,
by up to 1.7 in a real model."""

PIECE_ELEMENTS = 1 << 18
"""Logits worked on at a time (2 MiB in float64), so that the passes over them stay in the cache."""

KEPT_FAILURES = 8
"""Failures kept in full; more are only counted."""


@dataclass(frozen=True, slots=True)
class CallErrors:
    """Errors of one attend: ours and the reference's (relative L2 against float64), the greatest
    ratio of a row to its own limit, and ours against dense attention where top-k left blocks out.
    """

    layer: int
    step: int
    position: int
    rows: int
    ours: float
    reference: float
    worst_row: float
    against_dense: float | None = None

    @property
    def bound(self) -> float:
        """What promise 1 allows ``ours`` to be."""
        return PROMISE_FACTOR * max(self.reference, ERROR_FLOOR)

    @property
    def ok(self) -> bool:
        """Whether the promise holds. NaN never passes."""
        return self.ours <= self.bound and self.worst_row <= ROW_SLACK

    def failure(self) -> VerifyError:
        """The error to raise when the promise does not hold."""
        return VerifyError(
            f"layer {self.layer}, step {self.step} (token {self.position}, {self.rows} rows): "
            f"attention is off by {self.ours:.2e} against float64, at most {self.bound:.2e} is "
            "promised; the output is wrong: report it with the command line and this line"
        )


@dataclass(slots=True)
class VerifySummary:
    """All calls so far. ``max_error`` is NaN once any was NaN."""

    calls: int = 0
    rows: int = 0
    failures: int = 0
    max_error: float = 0.0
    bound_at_max: float = PROMISE_FACTOR * ERROR_FLOOR
    max_reference: float = 0.0
    max_against_dense: float | None = None
    kept_squares: float = 0.0
    rounded_squares: float = 0.0

    @property
    def rounding(self) -> float:
        """Relative L2 error of all K and V as they are kept."""
        return (self.rounded_squares / self.kept_squares) ** 0.5 if self.kept_squares else 0.0

    def add_rows(self, rows: F32, kept: F32) -> None:
        """Count rows of K or V."""
        self.kept_squares += float(np.square(rows, dtype=np.float64).sum())
        self.rounded_squares += float(np.square(rows - kept, dtype=np.float64).sum())

    def add(self, errors: CallErrors) -> None:
        """Count one call."""
        self.calls += 1
        self.rows += errors.rows
        self.failures += not errors.ok
        if not errors.ours <= self.max_error:  # NaN counts as greater, and stays
            self.max_error, self.bound_at_max = errors.ours, errors.bound
        self.max_reference = max(self.max_reference, errors.reference)
        if errors.against_dense is not None:
            self.max_against_dense = max(self.max_against_dense or 0.0, errors.against_dense)


class AttentionVerifier:
    """Keeps K and V of one sequence and checks attention outputs against them.

    ``record`` copies one attend's arrays and computes nothing, so that it can stand in a timed
    loop; ``check`` works through what was recorded. Memory: 4 bytes a value of K and V (BF16
    widened to float32, which is exact), twice that while the arrays grow.
    """

    def __init__(self, dims: ModelDims) -> None:
        self.summary = VerifySummary()
        self.failures: list[VerifyError] = []
        self._dims = dims
        self._caches = [_Cache(dims.group(layer)) for layer in range(dims.layers)]
        self._recorded: list[_Call] = []
        self._step = 0

    def record(
        self,
        layer: int,
        queries: U16,
        keys: U16,
        values: U16,
        out: U16,
        chosen: NDArray[np.int32] | None = None,
    ) -> None:
        """Take one append with its attend: shapes as in ``hsswap.models.Attention.attend``.

        ``chosen`` ``[kv_heads, n]``: the full blocks attended in top-k mode, None for all. The
        arrays may change afterwards. Raises ArgumentError when the shapes do not fit.
        """
        group = self._dims.group(layer)
        rows, q_heads, kv_heads = len(queries), group.q_heads, group.kv_heads
        if (queries.shape, keys.shape, values.shape, out.shape) != (
            (rows, q_heads, group.head_dim),
            (rows, kv_heads, group.head_dim),
            (rows, kv_heads, group.value_dim),
            (rows, q_heads, group.value_dim),
        ):
            raise ArgumentError(
                f"layer {layer}: queries {queries.shape}, keys {keys.shape}, values "
                f"{values.shape}, out {out.shape} do not fit {group}"
            )
        if chosen is not None and rows != 1:
            raise ArgumentError(f"{rows} rows in top-k mode; it attends one row at a time")
        self._recorded.append(
            _Call(
                layer,
                widen(queries),
                widen(keys),
                widen(values),
                widen(out),
                None if chosen is None else np.array(chosen),
            )
        )

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on. Everything recorded must be checked before."""
        for cache in self._caches:
            cache.length = min(cache.length, length)

    def check(self, between: Callable[[], None] | None = None) -> list[CallErrors]:
        """Check everything recorded, as one step (a chunk of prefill, or one token).

        Failures are added to ``failures`` and counted in ``summary``; nothing is raised for them.
        ``between`` is called before each call's check; what it raises passes through.
        """
        calls, self._recorded = self._recorded, []
        found = []
        for call in calls:
            if between is not None:
                between()
            errors = self._check(call)
            self.summary.add(errors)
            if not errors.ok and len(self.failures) < KEPT_FAILURES:
                self.failures.append(errors.failure())
            found.append(errors)
        self._step += 1
        return found

    def _check(self, call: _Call) -> CallErrors:
        cache = self._caches[call.layer]
        keys, values = kept_rows(cache.group, call.keys), kept_rows(cache.group, call.values)
        self.summary.add_rows(call.keys, keys)
        self.summary.add_rows(call.values, values)
        cache.append(keys, values)
        group, length, rows = cache.group, cache.length, len(call.queries)
        allowed = None
        if call.chosen is not None:
            allowed = allowed_tokens(call.chosen, length, self._dims.block_size)
        oracle = np.empty((rows, group.q_heads, group.value_dim))
        reference = np.empty((rows, group.q_heads, group.value_dim), np.float32)
        for piece in cache.pieces(call.queries):
            piece.attend(oracle, reference, allowed)
        reference = round_to_bf16(reference)
        against_dense = None
        if allowed is not None and not allowed.all():
            dense = np.empty_like(oracle)
            for piece in cache.pieces(call.queries):
                piece.attend(dense, np.empty_like(reference), None)
            against_dense = relative_error(call.out, dense)
        row_ours = _row_errors(call.out, oracle)
        row_limit = PROMISE_FACTOR * np.maximum(_row_errors(reference, oracle), ERROR_FLOOR)
        return CallErrors(
            layer=call.layer,
            step=self._step,
            position=length - rows,
            rows=rows,
            ours=relative_error(call.out, oracle),
            reference=relative_error(reference, oracle),
            worst_row=float((row_ours / row_limit).max()),
            against_dense=against_dense,
        )


class _Call(NamedTuple):
    """One recorded attend, widened to float32."""

    layer: int
    queries: F32
    keys: F32
    values: F32
    out: F32
    chosen: NDArray[np.int32] | None


class _Cache:
    """K and V of one layer, ``[kv_heads, tokens, dim]`` float32, growing by doubling."""

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.length = 0
        self._keys = np.empty((group.kv_heads, 256, group.head_dim), np.float32)
        self._values = np.empty((group.kv_heads, 256, group.value_dim), np.float32)

    def append(self, keys: F32, values: F32) -> None:
        end = self.length + len(keys)
        if end > self._keys.shape[1]:
            room = max(end, 2 * self._keys.shape[1])
            self._keys = _grown(self._keys, room)
            self._values = _grown(self._values, room)
        self._keys[:, self.length : end] = keys.transpose(1, 0, 2)
        self._values[:, self.length : end] = values.transpose(1, 0, 2)
        self.length = end

    def pieces(self, queries: F32) -> Iterator[_Piece]:
        """The work of one attend, cut by KV head and into rows of a bounded number of logits."""
        group, rows = self.group, len(queries)
        per_head = group.group_size
        step = max(1, PIECE_ELEMENTS // (per_head * self.length))
        for head in range(group.kv_heads):
            keys, values = self._keys[head, : self.length], self._values[head, : self.length]
            wide_keys, wide_values = keys.astype(np.float64), values.astype(np.float64)
            heads = slice(head * per_head, (head + 1) * per_head)
            for first in range(0, rows, step):
                part = slice(first, min(first + step, rows))
                end = self.length - rows + part.stop  # the last row of the piece sees no more
                yield _Piece(
                    group,
                    head,
                    heads,
                    part,
                    queries[part, heads],
                    keys[:end],
                    values[:end],
                    wide_keys[:end],
                    wide_values[:end],
                )


class _Piece(NamedTuple):
    """Some rows of one KV head's query heads; the last row sees all of ``keys``."""

    group: LayerGroup
    head: int
    heads: slice
    rows: slice
    queries: F32
    keys: F32
    values: F32
    wide_keys: F64
    wide_values: F64

    def attend(self, oracle: F64, reference: F32, allowed: Bools | None) -> None:
        """Fill this piece's part of both results; ``allowed`` ``[kv_heads, tokens]`` or None."""
        count, per_head, dim = self.queries.shape
        flat = self.queries.reshape(-1, dim)
        hidden = self._hidden(allowed)
        shape = (count, per_head, self.group.value_dim)

        weights: F64 = flat.astype(np.float64) @ self.wide_keys.T
        total = self._softmax(weights, np.float64(self.group.logit_scale), hidden)
        oracle[self.rows, self.heads] = (weights @ self.wide_values / total).reshape(shape)

        coarse: F32 = flat @ self.keys.T
        coarse_total = self._softmax(coarse, np.float32(self.group.logit_scale), hidden)
        coarse = round_to_bf16(coarse)
        reference[self.rows, self.heads] = (coarse @ self.values / coarse_total).reshape(shape)

    def _softmax(self, logits: NDArray[np.floating], scale: np.floating, hidden: _Hidden) -> F64:
        """Logits to exponentials, in place; their sums ``[rows, 1]``."""
        logits *= scale
        if self.group.soft_cap is not None:
            logits /= self.group.soft_cap
            np.tanh(logits, out=logits)
            logits *= self.group.soft_cap
        # [rows, query heads of the KV head, tokens]
        by_row = logits.reshape(*self.queries.shape[:2], -1)
        if hidden.own is not None:
            own = by_row[:, :, by_row.shape[2] - hidden.own.shape[1] :]
            np.copyto(own, -np.inf, where=hidden.own[:, None])
        if hidden.left_out is not None:
            by_row[:, :, hidden.left_out] = -np.inf
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        total: F64 = logits.sum(axis=1, keepdims=True)
        return total

    def _hidden(self, allowed: Bools | None) -> _Hidden:
        """What a row must not see: later rows' tokens, those out of its window, blocks left out."""
        count, tokens = len(self.queries), len(self.keys)
        own: Bools | None = None
        if self.group.window is not None:
            limit = tokens - count + np.arange(count)[:, None]
            position = np.arange(tokens)
            own = (position > limit) | (position <= limit - self.group.window)
        elif count > 1:
            own = ~np.tri(count, dtype=np.bool_)
        return _Hidden(own, None if allowed is None else ~allowed[self.head, :tokens])


class _Hidden(NamedTuple):
    """``own`` ``[rows, last tokens]`` and ``left_out`` ``[tokens]``: True gets no weight."""

    own: Bools | None
    left_out: Bools | None


def allowed_tokens(chosen: NDArray[np.int32], length: int, block_size: int) -> Bools:
    """``[kv_heads, length]``: the tokens of the chosen full blocks (-1: none) and of the last one.

    Raises ArgumentError for a block that is not full or does not exist, or is chosen twice.
    """
    full = length // block_size
    if chosen.size and (chosen.min() < -1 or chosen.max() >= full):
        raise ArgumentError(f"a chosen block is outside 0 to {full - 1}")
    blocks = np.zeros((len(chosen), full + 1), np.bool_)
    head, entry = np.nonzero(chosen >= 0)
    blocks[head, chosen[head, entry]] = True
    if int(blocks.sum()) != len(head):
        raise ArgumentError("a block is chosen twice for one KV head")
    blocks[:, full] = True
    return np.repeat(blocks, block_size, axis=1)[:, :length]


def relative_error(ours: NDArray[np.floating], oracle: F64) -> float:
    """``|ours - oracle| / |oracle|``, L2 over everything; 0 for 0 / 0, inf for x / 0."""
    difference = float(np.linalg.norm(ours.astype(np.float64) - oracle))
    size = float(np.linalg.norm(oracle))
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf" if difference > 0.0 else "nan")
    return difference / size


def _row_errors(ours: F32, oracle: F64) -> F64:
    """Relative L2 error of each row ``[rows]``; rows whose oracle is 0 count absolutely."""
    rows = len(oracle)
    difference = (ours.astype(np.float64) - oracle).reshape(rows, -1)
    size = np.linalg.norm(oracle.reshape(rows, -1), axis=1)
    errors: F64 = np.linalg.norm(difference, axis=1) / np.where(size == 0.0, 1.0, size)
    return errors


def _grown(array: F32, tokens: int) -> F32:
    """The same rows with room for ``tokens`` of them."""
    grown = np.empty((array.shape[0], tokens, array.shape[2]), np.float32)
    grown[:, : array.shape[1]] = array
    return grown
