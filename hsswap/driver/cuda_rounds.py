"""The kernels of speculative rounds on a GPU: parameters and grids, each under the name of its
method of :class:`~hsswap.driver.rounds_base.RoundKernels`.

Written against :class:`Launcher`, as ``cuda_operations``; the structs are those at the top of the
kernels' files. Bookkeeping takes a thread block a sequence, rows of logits one or more a row.
"""

from __future__ import annotations

import struct
from math import prod

from hsswap.driver.base import Stream
from hsswap.driver.cuda_operations import copy_words as copy_add  # noqa: F401 - found by its name
from hsswap.driver.cuda_rounds_rows import address_of
from hsswap.driver.cuda_rounds_rows import argmax as argmax
from hsswap.driver.cuda_rounds_rows import reject as reject
from hsswap.driver.cuda_rounds_rows import sample as sample
from hsswap.driver.cuda_seam import Grid, Launcher
from hsswap.driver.round_operations import (
    AcceptWork,
    AdaptWork,
    AssembleWork,
    CommitWork,
    IotaWork,
    MapWork,
    NgramWork,
    PackWork,
    RollbackWork,
    RoundEndWork,
    RoundRules,
    SeedWork,
    SetWork,
    TokenRingWork,
)
from hsswap.driver.tensor import Tensor

WARP = 32
WORD_THREADS = 256  # of round_words.cu
END_THREADS = 128  # of round_end: rows of hidden states and tables of lengths are copied by all


def _rules(rules: RoundRules) -> bytes:
    stops = rules.stop_tokens
    return struct.pack(
        "<QQIi", rules.flags.address, stops.address, rules.vocab_size, stops.shape[1]
    )


def _no_rules() -> bytes:
    return bytes(24)


# --- one thread a sequence or word


def _words(
    device: Launcher,
    stream: Stream,
    kernel: str,
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    numbers: tuple[int, ...],
    value: int = 0,
    *,
    threads: int | None = None,
) -> None:
    """``numbers``: rows, columns, index. ``threads``: as many as rows, unless given."""
    count = numbers[0] if threads is None else threads
    params = struct.pack("<QQQQqqqIi", *map(address_of, tensors), *numbers, value & 0xFFFFFFFF, 0)
    grid = Grid(-(-count // WORD_THREADS))
    device.launch(stream, kernel, {}, grid, Grid(WORD_THREADS), 0, params)


def pack_tok_p(device: Launcher, stream: Stream, work: PackWork) -> None:
    """See :class:`PackWork`."""
    tensors = (work.drafts, work.token, work.probability, None)
    numbers = (*work.drafts.shape, work.slot)
    _words(device, stream, "pack_tok_p", tensors, numbers)


def tok_map_u32(device: Launcher, stream: Stream, work: MapWork) -> None:
    """See :class:`MapWork`."""
    numbers = (work.token.shape[0], work.token_map.shape[0], 0)
    tensors = (work.token, None, work.token_map, work.flags)
    _words(device, stream, "tok_map", tensors, numbers)


def plain_tok_ring(device: Launcher, stream: Stream, work: TokenRingWork) -> None:
    """See :class:`TokenRingWork`."""
    tensors = (work.ring, work.token, work.pos_start, work.entry)
    _words(device, stream, "token_ring", tensors, (*work.ring.shape, 0))


def pos_iota_i32(device: Launcher, stream: Stream, work: IotaWork) -> None:
    """See :class:`IotaWork`."""
    tensors = (work.out, work.counter, None, None)
    numbers = (*work.out.shape, work.plus)
    _words(device, stream, "iota", tensors, numbers, threads=prod(work.out.shape))


def set_word(device: Launcher, stream: Stream, work: SetWork) -> None:
    """See :class:`SetWork`."""
    tensors = (work.target, None, None, None)
    _words(device, stream, "set_word", tensors, (*work.target.shape, work.index), work.value)


def ngram_draft(device: Launcher, stream: Stream, work: NgramWork) -> None:
    """See :class:`NgramWork`."""
    sequences, tokens = work.history.shape
    params = struct.pack(
        "<QQQQqiiii",
        work.history.address,
        work.pos.address,
        work.pend.address,
        work.drafts.address,
        tokens,
        work.drafts.shape[1] // 2,
        work.shortest,
        work.longest,
        0,
    )
    device.launch(stream, "ngram", {}, Grid(sequences), Grid(WORD_THREADS), 0, params)


# --- a thread block a sequence


def spec_assemble_verify(device: Launcher, stream: Stream, work: AssembleWork) -> None:
    """See :class:`AssembleWork`."""
    sequences, words = work.drafts.shape
    params = _rules(work.rules) + struct.pack(
        "<8Qqifii",
        work.drafts.address,
        work.pend.address,
        work.vtok.address,
        work.brk.address,
        work.pos_start.address,
        address_of(work.token_map),
        address_of(work.depth),
        address_of(work.capacity),
        0 if work.token_map is None else work.token_map.shape[0],
        words // 2,
        work.p_min,
        work.p_min_first,
        0,
    )
    device.launch(stream, "assemble", {}, Grid(sequences), Grid(WARP), 0, params)


def _end(
    device: Launcher,
    stream: Stream,
    acc: Tensor,
    *,
    accepting: AcceptWork | None = None,
    seeding: SeedWork | None = None,
    rolling: RollbackWork | None = None,
    committing: CommitWork | None = None,
    adapting: AdaptWork | None = None,
) -> None:
    """One launch of the parts that are given, in this order."""
    parts = (accepting, committing, seeding, rolling)
    brk = next((part.brk for part in parts if part is not None), None)
    vtok = next((part.vtok for part in (accepting, committing) if part is not None), None)
    ring = next((part.ring for part in (committing, accepting) if part is not None), None)
    start = next((part.pos_start for part in (rolling, committing) if part is not None), None)
    history = None if committing is None else committing.history
    rows, row_bytes = 0 if vtok is None else vtok.shape[1], 0
    if seeding is not None:
        _, rows, width = seeding.hidden.shape
        row_bytes = width * (2 if seeding.hidden.dtype == "bf16" else 4)
    params = _no_rules() if accepting is None else _rules(accepting.rules)
    params += struct.pack(
        "<16Qqqqiiiiii",
        *(address_of(t) for t in _accept_tensors(accepting, vtok, acc, brk, ring)),
        0 if seeding is None else seeding.hidden.address,
        0 if seeding is None else seeding.fill_prev.address,
        0 if seeding is None else seeding.h_seed.address,
        0 if rolling is None else rolling.len_ptrs.address,
        address_of(start),
        0 if committing is None else committing.pend.address,
        0 if committing is None else committing.flags.address,
        address_of(history),
        0 if adapting is None else adapting.depth.address,
        row_bytes,
        0 if ring is None else ring.shape[1],
        0 if history is None else history.shape[1],
        rows,
        0 if rolling is None else rolling.len_ptrs.shape[1],
        1 if adapting is None else adapting.depth.shape[1],
        0 if adapting is None else min(adapting.floor, (1 << 31) - 1),
        1 if adapting is None else min(adapting.cap, (1 << 31) - 1),
        0,
    )
    grid = Grid(acc.shape[0])
    device.launch(stream, "round_end", {}, grid, Grid(END_THREADS), 0, params)


def _accept_tensors(
    work: AcceptWork | None,
    vtok: Tensor | None,
    acc: Tensor,
    brk: Tensor | None,
    ring: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """preds, vtok, last_pred, acc, brk, ring, tally."""
    if work is None:
        return None, vtok, None, acc, brk, ring, None
    return work.preds, vtok, work.last_pred, acc, brk, ring, work.tally


def spec_accept_greedy_dc(device: Launcher, stream: Stream, work: AcceptWork) -> None:
    """See :class:`AcceptWork`."""
    _end(device, stream, work.acc, accepting=work)


def spec_seed_gather(device: Launcher, stream: Stream, work: SeedWork) -> None:
    """See :class:`SeedWork`."""
    _end(device, stream, work.acc, seeding=work)


def spec_rollback_stream(device: Launcher, stream: Stream, work: RollbackWork) -> None:
    """See :class:`RollbackWork`."""
    _end(device, stream, work.acc, rolling=work)


def spec_ring_commit(device: Launcher, stream: Stream, work: CommitWork) -> None:
    """See :class:`CommitWork`."""
    _end(device, stream, work.acc, committing=work)


def spec_adapt_k(device: Launcher, stream: Stream, work: AdaptWork) -> None:
    """See :class:`AdaptWork`."""
    _end(device, stream, work.acc, adapting=work)


def spec_round_end(device: Launcher, stream: Stream, work: RoundEndWork) -> None:
    """See :class:`RoundEndWork`."""
    _end(
        device,
        stream,
        work.accept.acc,
        accepting=work.accept,
        seeding=work.seed,
        rolling=work.rollback,
        committing=work.commit,
        adapting=work.adapt,
    )
