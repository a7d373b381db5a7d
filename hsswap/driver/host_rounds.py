"""The kernels of speculative rounds on the host device, each under the name of its method of
:class:`~hsswap.driver.rounds_base.RoundKernels`.

A batch has few sequences and a round few tokens, so the bookkeeping is plain Python over both; only
rows of logits and token histories are left to NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_rounds_sampling import reject as reject
from hsswap.driver.host_rounds_sampling import sample as sample
from hsswap.driver.round_operations import (
    NO_TOKEN,
    UNWRITTEN,
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
    RoundFlag,
    RunningWork,
    SeedWork,
    SetWork,
    TokenRingWork,
)
from hsswap.driver.tensor import Tensor

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]


def pack_tok_p(work: PackWork, scratch: Scratch) -> None:
    """See :class:`PackWork`."""
    drafts = work.drafts.array()
    drafts[:, 2 * work.slot] = work.token.array()
    drafts[:, 2 * work.slot + 1] = work.probability.array().view(np.uint32)


def tok_map_u32(work: MapWork, scratch: Scratch) -> None:
    """See :class:`MapWork`."""
    token, flags = work.token.array(), work.flags.array()
    table = work.token_map.array()
    known = token < len(table)
    flags[~known & (token != NO_TOKEN)] |= np.uint32(RoundFlag.BAD_DRAFT)
    token[known] = table[token[known]]
    token[~known] = NO_TOKEN


def spec_assemble_verify(work: AssembleWork, scratch: Scratch) -> None:
    """See :class:`AssembleWork`."""
    drafts, vtok, brk = work.drafts.array(), work.vtok.array(), work.brk.array()
    flags, pend = work.rules.flags.array(), work.pend.array()
    room = np.full(len(pend), vtok.shape[1] - 1)
    if work.capacity is not None:
        room = work.capacity.array().astype(np.int64) - work.pos_start.array()
        room -= pend != NO_TOKEN
    for s, pending in enumerate(pend.tolist()):
        base = int(pending != NO_TOKEN)
        if base and pending >= work.rules.vocab_size:
            flags[s] |= np.uint32(RoundFlag.BAD_TOKEN)
        if room[s] < 0:
            flags[s] |= np.uint32(RoundFlag.CAPACITY)
        taken = [] if flags[s] else _drafts_taken(work, s, base, int(room[s]))
        vtok[s] = 0
        if base and pending < work.rules.vocab_size:
            vtok[s, 0] = pending
        vtok[s, base : base + len(taken)] = taken
        brk[s] = len(taken), base
    drafts[:, ::2] = UNWRITTEN
    drafts[:, 1::2] = 0


def _drafts_taken(work: AssembleWork, s: int, base: int, room: int) -> list[int]:
    """The drafts of one sequence that will be verified. Flags a bad one, at which they end."""
    tokens = work.drafts.array()[s, ::2].tolist()
    confident = work.drafts.array()[s, 1::2].view(np.float32) >= np.float32(work.p_min)
    table: U32 | None = None if work.token_map is None else work.token_map.array()
    depth = len(tokens) if work.depth is None else int(work.depth.array()[s, 0])
    taken: list[int] = []
    for j, token in enumerate(tokens[: min(depth, room)]):
        may_stop = j > 0 or (work.p_min_first and base == 1)
        if token == NO_TOKEN or (work.p_min > 0 and may_stop and not confident[j]):
            break
        if table is not None:
            token = int(table[token]) if token < len(table) else UNWRITTEN
        if token >= work.rules.vocab_size:
            work.rules.flags.array()[s] |= np.uint32(RoundFlag.BAD_DRAFT)
            break
        taken.append(token)
    return taken


def spec_accept_greedy_dc(work: AcceptWork, scratch: Scratch) -> None:
    """See :class:`AcceptWork`."""
    flags, brk, acc = work.rules.flags.array(), work.brk.array(), work.acc.array()
    for s in range(len(acc)):
        used, base = brk[s].tolist()
        acc[s] = 0, NO_TOKEN
        if flags[s]:
            continue
        drafts = work.vtok.array()[s, base : base + used].tolist()
        choices = work.preds.array()[s].tolist()
        if not base:
            choices.insert(0, int(work.last_pred.array()[s]))
        count = 0
        while count < used and drafts[count] == choices[count]:
            count += 1
        emitted, flag = _emitted(work, s, choices[: count + 1])
        flags[s] |= np.uint32(flag)
        if emitted:
            acc[s] = len(emitted) - 1, emitted[-1]
            if work.tally is not None:
                work.tally.array()[s] += np.array([1, used, len(emitted) - 1], np.uint32)


def _emitted(work: AcceptWork, s: int, tokens: list[int]) -> tuple[list[int], RoundFlag]:
    """As many of the tokens as may be emitted, and why not all."""
    room = len(tokens)
    if work.ring is not None:
        ring = work.ring.array()[s]
        room = max(0, len(ring) - 1 - int(ring[0]))
    stops = set(work.rules.stop_tokens.array()[s].tolist()) - {NO_TOKEN}
    for i, token in enumerate(tokens):
        if i == room:
            return tokens[:i], RoundFlag.OVERFLOW
        if token >= work.rules.vocab_size:
            return tokens[:i], RoundFlag.BAD_TOKEN
        if token in stops:
            return tokens[: i + 1], RoundFlag.STOPPED
    return tokens, RoundFlag(0)


def _committed(acc: Tensor, brk: Tensor) -> I32:
    """Rows of K and V that a round commits, ``[S]``: 0 where it did nothing."""
    accepted, base = acc.array(), brk.array()[:, 1]
    rows: I32 = np.where(accepted[:, 1] == NO_TOKEN, 0, base + accepted[:, 0]).astype(np.int32)
    return rows


def spec_seed_gather(work: SeedWork, scratch: Scratch) -> None:
    """See :class:`SeedWork`."""
    hidden, into = work.hidden.array(), work.h_seed.array()
    for s, rows in enumerate(_committed(work.acc, work.brk).tolist()):
        into[s] = hidden[s, rows - 1] if rows else work.fill_prev.array()[s]


def spec_rollback_stream(work: RollbackWork, scratch: Scratch) -> None:
    """See :class:`RollbackWork`."""
    lengths = work.pos_start.array() + _committed(work.acc, work.brk)
    for pointers, length in zip(work.len_ptrs.array().tolist(), lengths, strict=True):
        for pointer in filter(None, pointers):
            Tensor(pointer, (1,), (4,), "i32", False, None).array()[0] = length


def spec_ring_commit(work: CommitWork, scratch: Scratch) -> None:
    """See :class:`CommitWork`."""
    acc, brk, ring = work.acc.array(), work.brk.array(), work.ring.array()
    for s in range(len(acc)):
        accepted, following = acc[s].tolist()
        if following == NO_TOKEN:
            continue
        base = int(brk[s, 1])
        tokens = [*work.vtok.array()[s, base : base + accepted].tolist(), following]
        count = min(int(ring[s, 0]), ring.shape[1] - 1)
        room = ring.shape[1] - 1 - count
        if len(tokens) > room:
            work.flags.array()[s] |= np.uint32(RoundFlag.OVERFLOW)
            tokens = tokens[:room]
        if not tokens:
            continue
        ring[s, 1 + count : 1 + count + len(tokens)] = tokens
        ring[s, 0] = count + len(tokens)
        work.pend.array()[s] = tokens[-1]
        if work.history is not None:
            history = work.history.array()[s]
            first = int(work.pos_start.array()[s]) + base
            known = history[first : first + len(tokens)]
            known[:] = tokens[: len(known)]


def spec_adapt_k(work: AdaptWork, scratch: Scratch) -> None:
    """See :class:`AdaptWork`."""
    wanted = np.maximum(work.acc.array()[:, 0].astype(np.int64) + 1, work.floor)
    work.depth.array()[:, 0] = np.minimum(wanted, work.cap)


def spec_round_end(work: RoundEndWork, scratch: Scratch) -> None:
    """See :class:`RoundEndWork`."""
    spec_accept_greedy_dc(work.accept, scratch)
    if work.seed is not None:
        spec_seed_gather(work.seed, scratch)
    spec_rollback_stream(work.rollback, scratch)
    spec_ring_commit(work.commit, scratch)
    if work.adapt is not None:
        spec_adapt_k(work.adapt, scratch)


def plain_tok_ring(work: TokenRingWork, scratch: Scratch) -> None:
    """See :class:`TokenRingWork`."""
    ring = work.ring.array()
    steps = work.pos_start.array().astype(np.int64) - work.entry.array()
    ring[np.arange(len(ring)), steps % ring.shape[1]] = work.token.array()


def is_running(work: RunningWork) -> bool:
    """See :class:`RunningWork`."""
    has_room = work.pos.array() < work.capacity.array()
    waits = has_room | (work.pend.array() == NO_TOKEN)
    return bool((waits & (work.flags.array() == 0)).any())


def argmax(work: ArgmaxWork, scratch: Scratch) -> None:
    """See :class:`ArgmaxWork`."""
    logits: NDArray[Any] = work.logits.array()
    shape = logits.shape[:2]
    is_number = ~np.isnan(logits)
    masked = scratch.array("masked", logits.shape, np.float32)
    np.copyto(masked, logits)
    masked[~is_number] = -np.inf
    best = np.max(masked, axis=2, keepdims=True)
    # Of the numbers: a row may be -inf where it is not NaN.
    chosen = np.argmax((masked == best) & is_number, axis=2)
    empty = ~is_number.any(axis=2)
    work.tokens.array()[...] = np.where(empty, NO_TOKEN, chosen)
    if work.probabilities is not None:
        np.subtract(masked, best, out=masked)
        total = np.exp(masked, out=masked).sum(axis=2, where=is_number)
        finite = np.isfinite(best).reshape(shape)
        work.probabilities.array()[...] = np.where(finite, np.float32(1.0) / total, 0.0)
    if work.flags is not None:
        work.flags.array()[empty.any(axis=1)] |= np.uint32(RoundFlag.BAD_TOKEN)


def pos_iota_i32(work: IotaWork, scratch: Scratch) -> None:
    """See :class:`IotaWork`."""
    out = work.out.array()
    out[...] = work.counter.array()[:, None] + np.arange(out.shape[1]) + work.plus


def copy_add(work: CopyWork, scratch: Scratch) -> None:
    """See :class:`CopyWork`."""
    source = work.source.array()
    work.target.array()[...] = (source.astype(np.int64) + work.plus).astype(source.dtype)


def set_word(work: SetWork, scratch: Scratch) -> None:
    """See :class:`SetWork`."""
    work.target.array()[:, work.index] = work.value


def ngram_draft(work: NgramWork, scratch: Scratch) -> None:
    """See :class:`NgramWork`."""
    drafts, history = work.drafts.array(), work.history.array()
    count = drafts.shape[1] // 2
    for s, (pos, pending) in enumerate(
        zip(work.pos.array().tolist(), work.pend.array().tolist(), strict=True)
    ):
        known = history[s, : max(0, pos + (pending != NO_TOKEN))]
        place = _last_place(known, work.shortest, work.longest)
        if place is None:
            drafts[s, ::2], drafts[s, 1::2] = NO_TOKEN, 0
        else:
            tail = known[place:]
            drafts[s, ::2] = tail[np.arange(count) % len(tail)]
            drafts[s, 1::2] = np.float32(1.0).view(np.uint32)


def _last_place(known: U32, shortest: int, longest: int) -> int | None:
    """Where the tokens begin that followed the last earlier place of the last n tokens."""
    for n in range(longest, shortest - 1, -1):
        starts = len(known) - n
        if starts < 1:
            continue
        same = np.ones(starts, np.bool_)
        for i in range(n):
            same &= known[i : i + starts] == known[starts + i]
        found = np.flatnonzero(same)
        if len(found):
            return int(found[-1]) + n
    return None
