"""Arguments of the Device operations, one record each, with shapes and dtypes.

Tensors are records of raw memory (:class:`Tensor`): an engine's pointers and NumPy arrays look the
same. Shape letters: S sequences of a launch, R query rows of each, Q query heads, H KV heads, B
blocks, T tokens of a block, dk and dv the dims of K and V. ``slot`` numbers count units in a device
pool and blocks in a host pool; -1 means none.

An argument that may be an index array or a Tensor is *held by the host* in the first case: copied
and checked when the work is enqueued. As a Tensor it is *held by the device*: read when the work
runs, so that earlier work on the stream, or each launch of a graph, may write it. Both give the
same bits. What it holds then is the caller's care: of the two devices the host alone checks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hsswap.config import DISK_ALIGNMENT, LayerGroup
from hsswap.driver.tensor import Tensor

if TYPE_CHECKING:
    from hsswap.driver.choice_operations import FetchWork

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


def unit_bytes_of(group: LayerGroup, block_size: int) -> int:
    """Bytes of one KV head of one block: the ``unit_bytes`` of ModelDims."""
    return block_size * group.token_bytes + group.aux_bytes


@dataclass(frozen=True, slots=True)
class UnitPool:
    """Device slots of one layer group: ``memory`` is u8 ``[slots, unit_bytes]``, contiguous, each
    unit K ``[T, dk]``, V ``[T, dv]``, in E4M3 their scales ``[T]`` and ``[T]``, aux.
    """

    memory: Tensor
    group: LayerGroup
    block_size: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit: the ``unit_bytes`` of ModelDims."""
        return unit_bytes_of(self.group, self.block_size)

    @property
    def slot_count(self) -> int:
        """Slots of the pool."""
        return self.memory.shape[0]


@dataclass(frozen=True, slots=True)
class PagePool:
    """An engine's own pages of one layer, attended where they lie: ``keys`` ``[P, T, H, dk]`` and
    ``values`` ``[P, T, H, dv]`` of the group's kv_dtype, any strides but contiguous along the dims.
    A slot is a page, for every head. E4M3 comes with float32 ``key_scales`` and ``value_scales``
    ``[P, T, H]`` of any strides: one scale for all is an array broadcast to that shape.
    """

    keys: Tensor
    values: Tensor
    group: LayerGroup
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        """T, a power of two from 1 to 256."""
        return self.keys.shape[1]

    @property
    def slot_count(self) -> int:
        """Pages."""
        return self.keys.shape[0]


@dataclass(frozen=True, slots=True)
class BlockPool:
    """Host slots of one layer group: ``memory`` is u8 ``[slots, block_bytes]``, contiguous, each
    block its H units in head order, then zeros.
    """

    memory: Tensor
    group: LayerGroup
    block_size: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit; head h of a block begins at byte ``h * unit_bytes``."""
        return unit_bytes_of(self.group, self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the ``block_bytes`` of ModelDims."""
        units = self.group.kv_heads * self.unit_bytes
        return -(-units // DISK_ALIGNMENT) * DISK_ALIGNMENT


def host_unit(host_slots: I32, heads: I32, kv_heads: int) -> I32:
    """Slot-table entries for units of host slots, which attention reads where they are.

    Entries from 0 up are device slots and -1 is none; -2 and below count the host units down.
    """
    return np.int32(-2) - (host_slots * np.int32(kv_heads) + heads)


@dataclass(frozen=True, slots=True)
class AppendWork:
    """Rows of K and V into units.

    ``keys`` ``[rows, H, dk]`` and ``values`` ``[rows, H, dv]``, of the group's dtype, any strides.
    Row i goes to token ``first_offset + i`` of the B = ceil((first_offset + rows) / T) destination
    blocks. ``device_slots`` ``[B, H]`` int32 and ``host_slots`` ``[B]`` int32 name each block's
    units in ``units`` and its slot in ``blocks``; a block may have one, both or none. Other tokens
    of the units keep what they held. Units of E4M3: rows are rounded as :mod:`hsswap.e4m3` says, or
    are E4M3 already and come with float32 ``key_scales`` and ``value_scales`` ``[rows, H]``.
    """

    keys: Tensor
    values: Tensor
    first_offset: int
    units: UnitPool
    device_slots: I32
    blocks: BlockPool
    host_slots: I32
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AppendAtWork:
    """R rows of K and V of each of S sequences, at token positions that the device holds.

    ``keys`` ``[S, R, H, dk]`` and ``values`` ``[S, R, H, dv]``, of the group's dtype, any strides.
    Row i of sequence s goes to token ``positions[s] + i``; ``positions`` ``[S]`` i32 or i64. The
    token's unit is entry ``token // T`` of ``slots`` ``[S, H, B]`` i32, a table as
    :class:`AttendWork` takes: into ``units``, or in place into a host slot of ``blocks``.
    ``host_slots`` ``[S, B]`` i32, if not None: the host slot of each block, which gets the row as
    well. Rows outside the B blocks, and entries of -1, are left out. ``slots`` and ``host_slots``
    are contiguous along B. E4M3 as for :class:`AppendWork`, scales ``[S, R, H]``.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    units: UnitPool
    slots: Tensor
    blocks: BlockPool
    host_slots: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GatherWork:
    """n units: head ``heads[i]`` of host slot ``host_slots[i]`` into ``device_slots[i]``.

    All three ``[n]`` int32. Device slots are distinct. ``heads`` None: n whole blocks, head h of
    one into unit ``device_slots[i] * H + h``.
    """

    blocks: BlockPool
    units: UnitPool
    host_slots: I32
    heads: I32 | None
    device_slots: I32

    def by_unit(self) -> GatherWork:
        """The same with a list of heads."""
        if self.heads is not None:
            return self
        count, heads = len(self.host_slots), self.units.group.kv_heads
        head = np.arange(heads, dtype=np.int32)
        return GatherWork(
            self.blocks,
            self.units,
            self.host_slots.repeat(heads),
            np.broadcast_to(head, (count, heads)).ravel(),
            (self.device_slots[:, None] * np.int32(heads) + head).ravel(),
        )


@dataclass(frozen=True, slots=True)
class ScatterWork:
    """n units: ``device_slots[i]`` into head ``heads[i]`` of host slot ``host_slots[i]``."""

    blocks: BlockPool
    units: UnitPool
    host_slots: I32
    heads: I32
    device_slots: I32


@dataclass(frozen=True, slots=True)
class AttentionState:
    """Carried between tiles: float32 ``maximum`` and ``total`` ``[S, R, Q]`` (running maximum of
    the logits and sum of exponentials), ``weighted`` ``[S, R, Q, dv]`` (unnormalised output). As in
    FlashAttention-2 (arXiv 2307.08691, section 3.1).
    """

    maximum: Tensor
    total: Tensor
    weighted: Tensor


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What makes up for attention that a choice of blocks lacks, of one sequence and one row.

    ``predicted`` ``[Q, B]`` float32: the logsumexp that each block's logits are thought to have,
    -inf where that is not known; any row stride. ``chosen`` ``[H, N]`` int32: the blocks that were
    attended, distinct, -1: none. R being the sum of exponentials over the others, and A what was
    attended, an output o of query head q becomes o + R / (R + A) (scale o + value), in float32
    before it is rounded. ``scale`` ``[Q]`` and ``value`` ``[Q, dv]`` float32 are of
    :mod:`hsswap.predictor.stand_in`. All contiguous but ``predicted``.
    """

    predicted: Tensor
    chosen: Tensor
    scale: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class FinalizeWork:
    """``out`` ``[S, R, Q, dv]`` BF16 or FP16, any strides: weighted / total, or 0 where a row saw
    nothing.

    ``lse`` ``[S, R, Q]`` float32, if not None: log of the sum of exponentials of the logits.
    ``block_mass`` ``[S, H, B]`` float32, if not None: each block's share of the attention,
    exp(block_lse - lse), averaged over the rows and the head's query group; ``block_lse``
    ``[S, R, Q, B]`` is what :class:`AttendWork` wrote. ``sinks`` ``[Q]`` float32, if not None: a
    logit of each query head that takes part in the softmax and has no value (learned sinks, arXiv
    2309.17453, section 3.1); ``lse`` and ``block_mass`` are then with it. ``left_out``, if not
    None, changes ``out`` alone.
    """

    state: AttentionState
    out: Tensor
    lse: Tensor | None = None
    block_lse: Tensor | None = None
    block_mass: Tensor | None = None
    sinks: Tensor | None = None
    left_out: LeftOut | None = None


@dataclass(frozen=True, slots=True)
class AttendWork:
    """Attention of R query rows of S sequences over one tile.

    ``queries`` ``[S, R, Q, dk]`` of the group's dtype. ``lengths`` ``[S]`` int64: tokens that the
    *last* row sees; row r sees ``lengths - (R - 1 - r)``, none if that is not positive, and with a
    window only the last ``window`` of them. ``slots`` ``[S, H, B]`` int32 into ``units``, or, where
    ``blocks`` is given, into host slots read in place (:func:`host_unit`); ``positions`` ``[S, H,
    B]`` int32 is each entry's logical block number, so entry b holds tokens ``position * T ...``;
    an entry with slot -1 is skipped. None: entry b is block ``first_block + b``, and
    ``first_block`` must be the first of a span.

    ``lengths`` (i32 or i64), ``slots`` and ``positions`` may be held by the device; the two tables
    are then contiguous along B, equally far from head to head, and sequences are H heads apart.
    ``added_tokens``: tokens that the last row sees beyond ``lengths``, for a counter that stands
    before the rows of this step. Entries behind a row's length change no bit, so a table may be as
    long as the sequence can become. ``is_full``: of slots that the device holds all are device
    slots. Partials are taken over spans of ``span_blocks`` entries in entry order and folded into
    ``state`` in that order; the tile is whole spans, except that the last one of the sequence may
    be short. ``begin``: ignore what ``state`` held. ``block_lse`` ``[S, R, Q, B]`` float32, if not
    None, receives each entry's logsumexp (-inf where a row sees nothing of it, perhaps also below
    2^-126 of what is beside it). Unwritten and unseen tokens get no weight, even if they are NaN.

    ``end``, if not None, is finalized behind it, in the same launch where that can be: its state is
    ``state``, of which nothing is defined afterwards, its ``block_lse`` the same as here. So is
    ``fetch`` done ahead of it, for one sequence: its pools and lists are ``units``, ``blocks``,
    ``slots`` and ``positions``, and what the lists hold is not defined afterwards.
    """

    queries: Tensor
    lengths: I64 | Tensor
    units: UnitPool | PagePool
    slots: I32 | Tensor
    first_block: int
    positions: I32 | Tensor | None
    span_blocks: int
    state: AttentionState
    begin: bool
    block_lse: Tensor | None = None
    blocks: BlockPool | None = None
    added_tokens: int = 0
    end: FinalizeWork | None = None
    fetch: FetchWork | None = None
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class ProjectionCodes:
    """Codes of the projection predictor, of one layer: ``codes`` ``[ids, H, T, rank]`` BF16 by
    block index, ``matrix`` ``[dk, rank]`` BF16 (arXiv 2511.11907 for low-rank keys as a predictor;
    the random matrix is that of Johnson and Lindenstrauss, entries N(0, 1/dk)).
    """

    codes: Tensor
    matrix: Tensor
    group: LayerGroup


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Codes of n blocks: keys of host slots ``host_slots`` ``[n]`` times the matrix, to
    ``code_index`` ``[n]``. All blocks are full.
    """

    into: ProjectionCodes
    blocks: BlockPool
    host_slots: I32
    code_index: I32


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Scores of B full blocks of one sequence: ``scores`` ``[H, B]`` float32.

    ``queries`` ``[Q, dk]`` of the group's dtype; ``code_index`` ``[B]`` int32, which the device may
    hold: there an entry of -1 is no block, and scores -inf. Projection: the maximum over the
    block's tokens and the head's query group of projected q.k, times the logit scale.
    """

    codes: ProjectionCodes
    queries: Tensor
    code_index: I32 | Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True)
class UnitCache:
    """The unit slots one (sequence, layer) owns on the device, C for each KV head.

    ``slots`` ``[H, C]`` int32 into the pool, fixed. ``owner`` ``[H, C]`` int32: the logical block
    held, -1 none. ``mass`` ``[H, C]`` float32: decayed true attention mass. ``used`` ``[H, C]``
    int32: step of last use. Only ``select`` writes the last three; at step 0 it takes the cache as
    empty, whatever they hold.
    """

    slots: Tensor
    owner: Tensor
    mass: Tensor
    used: Tensor


@dataclass(frozen=True, slots=True)
class SelectWork:
    """Top-k of each KV head, and where its units will be.

    ``scores`` ``[H, B]`` float32. Chosen are blocks ``pinned`` ``[P]`` int32 (P distinct blocks)
    and the ``k`` best others (all, if there are fewer), equal scores to the lower block; N =
    min(B, P + k) a head, C >= N. ``step`` grows by one a call; 0: the cache is empty. The device
    may hold both: ``pinned`` i32, whose entries of -1 pin nothing (another block is chosen), and
    ``step`` ``[H]`` i32, all equal, which the call advances.

    First the masses decay by ``decay`` and gain ``last_mass`` ``[H, M]`` float32 of blocks
    ``last_chosen`` ``[H, M]`` int32 (None at the first step). Chosen blocks not in the cache take
    free slots, then those of the unchosen block of least mass, then least recent use, then lowest
    place; of the places taken so, the n-th such block has the n-th.

    Written: ``chosen`` ``[H, N]`` int32 in ascending order (``last_chosen`` may be the same
    memory), ``chosen_slots`` ``[H, N]`` int32 unit slots, ``missing`` ``[H, N]`` uint8 (1: the unit
    must be gathered into its slot before use), ``left_out`` ``[H]`` float32: the share of predicted
    mass not chosen, softmax over blocks of ``shares`` ``[H, B]`` float32 (``scores``, or what is
    less partial than they are).
    """

    scores: Tensor
    shares: Tensor
    k: int
    pinned: I32 | Tensor
    cache: UnitCache
    step: int | Tensor
    decay: float
    last_chosen: Tensor | None
    last_mass: Tensor | None
    chosen: Tensor
    chosen_slots: Tensor
    missing: Tensor
    left_out: Tensor


@dataclass(frozen=True, slots=True)
class ChecksumWork:
    """CRC-32 of n blocks ``block_slots`` ``[n]`` int32 of ``blocks``, all ``block_bytes`` of each,
    started from ``seeds`` ``[n]`` uint32, to ``out`` ``[n]`` uint32.
    """

    blocks: BlockPool
    block_slots: I32
    seeds: NDArray[np.uint32]
    out: Tensor
