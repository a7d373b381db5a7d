"""Checks of the records of speculative rounds, before anything is enqueued.

Each function takes a record and returns it, or raises ArgumentError (ClosedError for memory that
was closed). No value of a tensor is looked at: they are not known yet.
"""

from __future__ import annotations

from hsswap.driver.check_parts import check_tensor, require, shape_of_rank
from hsswap.driver.round_operations import (
    NO_TOKEN,
    AcceptWork,
    AdaptWork,
    ArgmaxWork,
    AssembleWork,
    CommitWork,
    CopyWork,
    IotaWork,
    MapWork,
    NgramWork,
    PackWork,
    RollbackWork,
    RoundEndWork,
    RoundRules,
    RunningWork,
    SeedWork,
    SetWork,
    TokenRingWork,
)
from hsswap.driver.sampling_operations import RejectWork, SampleWork, Sampling
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.errors import ArgumentError

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8, "u32": 4}

NGRAM_LONGEST = 8
"""Tokens that an n-gram may have: a kernel compares them from registers."""


def _tensor(
    tensor: Tensor, dtype: str, shape: tuple[int, ...], what: str, *, written: bool = False
) -> None:
    check_tensor(tensor, dtype, shape, what, written=written)
    wanted = contiguous_strides(shape, ITEM_BYTES[dtype])
    # The stride of an axis of one element is never used.
    strides = zip(tensor.strides, wanted, shape, strict=True)
    require(all(a == b or n == 1 for a, b, n in strides), f"{what} must be contiguous")


def _rules(rules: RoundRules, sequences: int) -> None:
    _tensor(rules.flags, "u32", (sequences,), "flags", written=True)
    stops = shape_of_rank(rules.stop_tokens, 2, "stop_tokens")[1]
    _tensor(rules.stop_tokens, "u32", (sequences, stops), "stop_tokens")
    require(
        1 <= rules.vocab_size <= 1 << 31,
        f"vocab_size is {rules.vocab_size}; 1 to 2**31 is possible",
    )


def _drafts(drafts: Tensor) -> tuple[int, int]:
    """Sequences and K of a tensor of drafts."""
    sequences, words = shape_of_rank(drafts, 2, "drafts")
    require(words >= 2 and words % 2 == 0, f"drafts has {words} words a sequence; 2 a draft, K > 0")
    _tensor(drafts, "u32", (sequences, words), "drafts", written=True)
    return sequences, words // 2


def _acc_brk(acc: Tensor, brk: Tensor, sequences: int) -> None:
    _tensor(acc, "u32", (sequences, 2), "acc", written=True)
    _tensor(brk, "u32", (sequences, 2), "brk", written=True)


def pack(work: PackWork) -> PackWork:
    """Check a PackWork."""
    sequences, drafts = _drafts(work.drafts)
    _tensor(work.token, "u32", (sequences,), "token")
    _tensor(work.probability, "f32", (sequences,), "probability")
    require(0 <= work.slot < drafts, f"slot is {work.slot}; 0 to {drafts - 1} is possible")
    return work


def map_tokens(work: MapWork) -> MapWork:
    """Check a MapWork."""
    sequences = shape_of_rank(work.token, 1, "token")[0]
    _tensor(work.token, "u32", (sequences,), "token", written=True)
    _tensor(work.token_map, "u32", shape_of_rank(work.token_map, 1, "token_map"), "token_map")
    _tensor(work.flags, "u32", (sequences,), "flags", written=True)
    return work


def assemble(work: AssembleWork) -> AssembleWork:
    """Check an AssembleWork."""
    sequences, drafts = _drafts(work.drafts)
    _rules(work.rules, sequences)
    _tensor(work.pend, "u32", (sequences,), "pend")
    _tensor(work.vtok, "u32", (sequences, drafts + 1), "vtok", written=True)
    _tensor(work.brk, "u32", (sequences, 2), "brk", written=True)
    _tensor(work.pos_start, "i32", (sequences,), "pos_start")
    if work.token_map is not None:
        _tensor(work.token_map, "u32", shape_of_rank(work.token_map, 1, "token_map"), "token_map")
    if work.depth is not None:
        _tensor(work.depth, "u32", (sequences, 1), "depth")
    if work.capacity is not None:
        _tensor(work.capacity, "i32", (sequences,), "capacity")
    require(0.0 <= work.p_min <= 1.0, f"p_min is {work.p_min}; 0 to 1 is possible")
    return work


def accept(work: AcceptWork) -> AcceptWork:
    """Check an AcceptWork."""
    sequences, rows = shape_of_rank(work.vtok, 2, "vtok")
    require(rows >= 2, f"vtok has {rows} rows a sequence; K + 1 with K > 0 are needed")
    _rules(work.rules, sequences)
    _tensor(work.preds, "u32", (sequences, rows), "preds")
    _tensor(work.vtok, "u32", (sequences, rows), "vtok")
    _tensor(work.last_pred, "u32", (sequences,), "last_pred")
    _acc_brk(work.acc, work.brk, sequences)
    if work.ring is not None:
        _ring(work.ring, sequences)
    if work.tally is not None:
        _tensor(work.tally, "u32", (sequences, 3), "tally", written=True)
    return work


def _ring(ring: Tensor, sequences: int) -> None:
    words = shape_of_rank(ring, 2, "ring")[1]
    require(words >= 2, f"ring has {words} words a sequence; a count and room for a token needed")
    _tensor(ring, "u32", (sequences, words), "ring", written=True)


def seed(work: SeedWork) -> SeedWork:
    """Check a SeedWork."""
    sequences, rows, width = shape_of_rank(work.hidden, 3, "hidden")
    dtype = work.hidden.dtype
    require(dtype in ("f32", "bf16"), f"hidden has dtype {dtype}; f32 or bf16 is needed")
    _tensor(work.hidden, dtype, (sequences, rows, width), "hidden")
    _tensor(work.fill_prev, dtype, (sequences, width), "fill_prev")
    _tensor(work.h_seed, dtype, (sequences, width), "h_seed", written=True)
    _acc_brk(work.acc, work.brk, sequences)
    return work


def rollback(work: RollbackWork) -> RollbackWork:
    """Check a RollbackWork."""
    sequences, counters = shape_of_rank(work.len_ptrs, 2, "len_ptrs")
    _tensor(work.len_ptrs, "i64", (sequences, counters), "len_ptrs")
    _tensor(work.pos_start, "i32", (sequences,), "pos_start")
    _acc_brk(work.acc, work.brk, sequences)
    return work


def commit(work: CommitWork) -> CommitWork:
    """Check a CommitWork."""
    sequences, rows = shape_of_rank(work.vtok, 2, "vtok")
    _tensor(work.vtok, "u32", (sequences, rows), "vtok")
    _acc_brk(work.acc, work.brk, sequences)
    _ring(work.ring, sequences)
    _tensor(work.pend, "u32", (sequences,), "pend", written=True)
    _tensor(work.flags, "u32", (sequences,), "flags", written=True)
    _tensor(work.pos_start, "i32", (sequences,), "pos_start")
    if work.history is not None:
        shape = (sequences, shape_of_rank(work.history, 2, "history")[1])
        _tensor(work.history, "u32", shape, "history", written=True)
    return work


def adapt(work: AdaptWork) -> AdaptWork:
    """Check an AdaptWork."""
    sequences, words = shape_of_rank(work.depth, 2, "depth")
    require(words >= 1, "depth has no word a sequence")
    _tensor(work.depth, "u32", (sequences, words), "depth", written=True)
    _tensor(work.acc, "u32", (sequences, 2), "acc")
    require(
        work.floor >= 0 and work.cap >= 1,
        f"floor is {work.floor} and cap {work.cap}; a floor of 0 and a cap of 1 are the least",
    )
    return work


def round_end(work: RoundEndWork) -> RoundEndWork:
    """Check a RoundEndWork: each part, and that they are of one round."""
    accepted = accept(work.accept)
    parts: list[RollbackWork | CommitWork | SeedWork] = [
        rollback(work.rollback),
        commit(work.commit),
    ]
    if work.seed is not None:
        parts.append(seed(work.seed))
    for part in parts:
        _same(accepted.acc, part.acc, "acc")
        _same(accepted.brk, part.brk, "brk")
    _same(accepted.vtok, work.commit.vtok, "vtok")
    _same(accepted.rules.flags, work.commit.flags, "flags")
    _same(work.rollback.pos_start, work.commit.pos_start, "pos_start")
    if accepted.ring is None:
        raise ArgumentError("the accept of a round's end must know the ring")
    _same(accepted.ring, work.commit.ring, "ring")
    if work.seed is not None:
        rows = work.seed.hidden.shape[1]
        require(rows == accepted.vtok.shape[1], f"hidden has {rows} rows a sequence; not K + 1")
    if work.adapt is not None:
        _same(accepted.acc, adapt(work.adapt).acc, "acc")
    return work


def _same(one: Tensor, other: Tensor, what: str) -> None:
    require(
        (one.address, one.shape) == (other.address, other.shape),
        f"the parts of a round's end name different tensors as {what}",
    )


def token_ring(work: TokenRingWork) -> TokenRingWork:
    """Check a TokenRingWork."""
    sequences, words = shape_of_rank(work.ring, 2, "ring")
    require(words >= 1, "ring has no room for a token")
    _tensor(work.ring, "u32", (sequences, words), "ring", written=True)
    _tensor(work.token, "u32", (sequences,), "token")
    _tensor(work.pos_start, "i32", (sequences,), "pos_start")
    _tensor(work.entry, "i32", (sequences,), "entry")
    return work


def argmax(work: ArgmaxWork) -> ArgmaxWork:
    """Check an ArgmaxWork."""
    sequences, rows, vocab = shape_of_rank(work.logits, 3, "logits")
    require(1 <= vocab <= 1 << 31, f"logits has rows of {vocab}; 1 to 2**31 is possible")
    _tensor(work.logits, "f32", (sequences, rows, vocab), "logits")
    _tensor(work.tokens, "u32", (sequences, rows), "tokens", written=True)
    if work.probabilities is not None:
        _tensor(work.probabilities, "f32", (sequences, rows), "probabilities", written=True)
    if work.flags is not None:
        _tensor(work.flags, "u32", (sequences,), "flags", written=True)
    return work


def iota(work: IotaWork) -> IotaWork:
    """Check an IotaWork."""
    sequences, count = shape_of_rank(work.out, 2, "out")
    _tensor(work.out, "i32", (sequences, count), "out", written=True)
    _tensor(work.counter, "i32", (sequences,), "counter")
    return work


def copy(work: CopyWork) -> CopyWork:
    """Check a CopyWork."""
    require(isinstance(work.source, Tensor), "source must be a Tensor")
    dtype, shape = work.source.dtype, work.source.shape
    require(dtype in ("i32", "u32"), f"source has dtype {dtype}; i32 or u32 is needed")
    _tensor(work.source, dtype, shape, "source")
    _tensor(work.target, dtype, shape, "target", written=True)
    require(-(1 << 31) <= work.plus < 1 << 31, f"plus is {work.plus}; an int32 is needed")
    return work


def set_word(work: SetWork) -> SetWork:
    """Check a SetWork."""
    sequences, words = shape_of_rank(work.target, 2, "target")
    dtype = work.target.dtype
    require(dtype in ("i32", "u32"), f"target has dtype {dtype}; i32 or u32 is needed")
    _tensor(work.target, dtype, (sequences, words), "target", written=True)
    require(0 <= work.index < words, f"index is {work.index}; 0 to {words - 1} is possible")
    low, high = (0, NO_TOKEN) if dtype == "u32" else (-(1 << 31), (1 << 31) - 1)
    require(low <= work.value <= high, f"value is {work.value}; {low} to {high} is possible")
    return work


def ngram(work: NgramWork) -> NgramWork:
    """Check a NgramWork."""
    sequences, _ = _drafts(work.drafts)
    room = shape_of_rank(work.history, 2, "history")[1]
    _tensor(work.history, "u32", (sequences, room), "history")
    _tensor(work.pos, "i32", (sequences,), "pos")
    _tensor(work.pend, "u32", (sequences,), "pend")
    require(
        1 <= work.shortest <= work.longest <= NGRAM_LONGEST,
        f"shortest is {work.shortest} and longest {work.longest}; 1 to {NGRAM_LONGEST} in order",
    )
    return work


def running(work: RunningWork) -> RunningWork:
    """Check a RunningWork."""
    sequences = shape_of_rank(work.flags, 1, "flags")[0]
    for name, dtype in (("flags", "u32"), ("pos", "i32"), ("pend", "u32"), ("capacity", "i32")):
        _tensor(getattr(work, name), dtype, (sequences,), name)
    return work


def _sampling(sampling: Sampling, sequences: int) -> None:
    for name, dtype in (("temperature", "f32"), ("top_k", "u32"), ("top_p", "f32")):
        _tensor(getattr(sampling, name), dtype, (sequences,), name)
    _tensor(sampling.min_p, "f32", (sequences,), "min_p")
    _tensor(sampling.seed, "u32", (sequences, 2), "seed")


def sample(work: SampleWork) -> SampleWork:
    """Check a SampleWork."""
    sequences, rows, vocab = shape_of_rank(work.logits, 3, "logits")
    _tensor(work.logits, "f32", (sequences, rows, vocab), "logits")
    _sampling(work.sampling, sequences)
    _tensor(work.position, "i32", (sequences,), "position")
    _tensor(work.tokens, "u32", (sequences, rows), "tokens", written=True)
    if work.probabilities is not None:
        _tensor(work.probabilities, "f32", (sequences, rows), "probabilities", written=True)
    if work.distribution is not None:
        _tensor(work.distribution, "f32", work.logits.shape, "distribution", written=True)
    return work


def reject(work: RejectWork) -> RejectWork:
    """Check a RejectWork."""
    sequences, rows, vocab = shape_of_rank(work.logits, 3, "logits")
    require(rows >= 2, f"logits has {rows} rows a sequence; K + 1 with K > 0 are needed")
    _tensor(work.logits, "f32", (sequences, rows, vocab), "logits")
    _sampling(work.sampling, sequences)
    _tensor(work.pos_start, "i32", (sequences,), "pos_start")
    _tensor(work.vtok, "u32", (sequences, rows), "vtok")
    _tensor(work.brk, "u32", (sequences, 2), "brk")
    _tensor(work.preds, "u32", (sequences, rows), "preds", written=True)
    if work.draft_distribution is not None:
        shape = (sequences, rows - 1, vocab)
        _tensor(work.draft_distribution, "f32", shape, "draft_distribution")
    return work
