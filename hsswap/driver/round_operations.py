"""Arguments of the kernels of speculative rounds, one record each, with shapes and dtypes.

Letters: S sequences of a launch, K drafts of a round, R rows of logits a sequence, V vocabulary,
W width of the hidden state. All tensors are contiguous; a row of a leading S belongs to one
sequence, and no kernel lets one sequence see another's.

Words. ``pos``: tokens of a sequence whose K and V count; row ``r`` of a verify stands at position
``pos + r``. *Pending token*: the last one emitted, whose K and V are not written yet; it is row 0
of the next verify. ``base`` is 1 if there is one, else 0. ``acc`` = [accepted drafts, next token],
``brk`` = [drafts used, base]. A round commits ``base + accepted`` rows of K and V, and emits
``accepted + 1`` tokens. ``acc[1] == NO_TOKEN``: the round did nothing and commits nothing.

A sequence *halts* when one of its flags is set: its later rounds do nothing until the flags are
zeroed. What was committed before stays right, and so do position and pending token.

The kernels are those of the round stream in memra (``cu/spec_sample.cu``), built anew with a batch
axis, ``base`` read from ``brk`` everywhere, and limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

from hsswap.driver.tensor import Tensor

NO_TOKEN = 0xFFFFFFFF
"""As the pending token: there is none. In a draft's slot: no more drafts this round. As a
prediction: a row of NaN."""

UNWRITTEN = 0xFFFFFFFE
"""What a draft's slot holds until its drafter writes it."""


class RoundFlag(IntFlag):
    """Why a sequence halted. Bits of ``flags`` u32 ``[S]``."""

    OVERFLOW = 1  # the ring had no room for a token; the tokens before it were committed
    BAD_TOKEN = 2  # the model's next token is outside the vocabulary, or its logits are NaN
    STOPPED = 4  # the last committed token is a stop token
    CAPACITY = 8  # there was no room left for the pending token's row
    BAD_DRAFT = 16  # a draft is outside the vocabulary, or was not written


@dataclass(frozen=True, slots=True)
class RoundRules:
    """What holds for every round: ``flags`` u32 ``[S]``; ``stop_tokens`` u32 ``[S, E]``, unused
    entries NO_TOKEN; tokens are below ``vocab_size``.
    """

    flags: Tensor
    stop_tokens: Tensor
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PackWork:
    """``drafts[s, 2 * slot] = token[s]`` and ``drafts[s, 2 * slot + 1]`` = the bits of
    ``probability[s]``.

    ``token`` u32 ``[S]``, ``probability`` float32 ``[S]``, ``drafts`` u32 ``[S, 2K]``.
    """

    token: Tensor
    probability: Tensor
    drafts: Tensor
    slot: int


@dataclass(frozen=True, slots=True)
class MapWork:
    """``token[s] = token_map[token[s]]`` in place: from a draft head's vocabulary to the target's.

    ``token`` u32 ``[S]``, ``token_map`` u32 ``[n]``. A token of ``n`` or more becomes NO_TOKEN, and
    unless it was NO_TOKEN ``flags`` u32 ``[S]`` gain BAD_DRAFT.
    """

    token: Tensor
    token_map: Tensor
    flags: Tensor


@dataclass(frozen=True, slots=True)
class AssembleWork:
    """The tokens that a round verifies.

    ``drafts`` u32 ``[S, 2K]`` as :class:`PackWork` fills it, ``pend`` u32 ``[S]``, ``vtok`` u32
    ``[S, K + 1]``, ``brk`` u32 ``[S, 2]``. ``token_map`` u32 ``[n]`` or None: drafts are indices
    into it.

    ``vtok`` is the pending token, if any, then drafts in order, up to the first that is NO_TOKEN,
    or beyond ``depth`` u32 ``[S, 1]`` (None: K) or the sequence's room, or, where ``p_min`` > 0, of
    a probability under ``p_min`` (which draft 0 may have, unless ``p_min_first`` and there is a
    pending token); the rest is token 0, a legal one. ``brk`` = [drafts taken, base].

    The room is ``capacity - pos_start - base`` drafts (both int32 ``[S]``; capacity None: no
    limit), so that no round commits a row at ``capacity`` or behind it. Rows from ``base + drafts
    taken`` on are filler: their positions may pass the capacity, nothing they lead to is used.

    Flags: BAD_TOKEN for a pending token outside the vocabulary, CAPACITY for a room under 0,
    BAD_DRAFT at a draft outside the vocabulary or UNWRITTEN. A halted sequence gets ``brk`` = [0,
    base] and token 0 for every draft.

    Afterwards every slot of ``drafts`` is UNWRITTEN, with probability 0.
    """

    drafts: Tensor
    pend: Tensor
    vtok: Tensor
    brk: Tensor
    rules: RoundRules
    pos_start: Tensor
    p_min: float = 0.0
    p_min_first: bool = False
    token_map: Tensor | None = None
    depth: Tensor | None = None
    capacity: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AcceptWork:
    """How many drafts the model would have chosen itself, and its token after them.

    ``preds`` u32 ``[S, K + 1]``: the model's choice after each row of ``vtok`` u32 ``[S, K + 1]``;
    ``last_pred`` u32 ``[S]``: its choice before row 0, read only where base is 0; ``brk`` u32
    ``[S, 2]``; ``acc`` u32 ``[S, 2]`` is written.

    Choice i is ``preds[base + i - 1]`` (``last_pred`` at -1). Accepted are the drafts before the
    first that differs from its choice; emitted are they and the next choice, in order, ended by

    * the end of the ring (``ring`` u32 ``[S, 1 + C]``, None: no limit): OVERFLOW,
    * a choice outside the vocabulary, which is not emitted: BAD_TOKEN,
    * a stop token, which is the last one emitted: STOPPED.

    ``acc`` = [emitted - 1, last emitted], or [0, NO_TOKEN] for nothing emitted and for a sequence
    that has halted. ``tally`` u32 ``[S, 3]``, if not None, gains [1, drafts used, accepted] for a
    round that emitted something.
    """

    preds: Tensor
    vtok: Tensor
    last_pred: Tensor
    brk: Tensor
    acc: Tensor
    rules: RoundRules
    ring: Tensor | None = None
    tally: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SeedWork:
    """``h_seed[s] = hidden[s, j - 1]`` with j = base + accepted, ``fill_prev[s]`` where j is 0.

    ``hidden`` ``[S, K + 1, W]``, ``fill_prev`` and ``h_seed`` ``[S, W]`` (they may be one), all
    float32 or all BF16: the model's own hidden state at the last committed row, which seeds the
    next draft. ``acc``, ``brk`` u32 ``[S, 2]``.
    """

    hidden: Tensor
    fill_prev: Tensor
    acc: Tensor
    brk: Tensor
    h_seed: Tensor


@dataclass(frozen=True, slots=True)
class RollbackWork:
    """Every int32 that ``len_ptrs`` int64 ``[S, N]`` points to becomes ``pos_start + base +
    accepted`` of its sequence; pointer 0 is skipped.

    ``pos_start`` int32 ``[S]``; ``acc``, ``brk`` u32 ``[S, 2]``. Lengths are moved, not bytes:
    rejected rows of K and V are overwritten by the next append.
    """

    len_ptrs: Tensor
    pos_start: Tensor
    acc: Tensor
    brk: Tensor


@dataclass(frozen=True, slots=True)
class CommitWork:
    """Emitted tokens into the ring: ``ring`` u32 ``[S, 1 + C]`` holds a count, then tokens.

    Appended are ``vtok[base : base + accepted]`` and ``acc[1]``, which becomes ``pend`` u32 ``[S]``
    too. Where the ring is full the rest is left out (``pend`` is then the last one written) and
    ``flags`` u32 ``[S]`` gain OVERFLOW; an AcceptWork that knows the ring never lets it come to
    that. ``history`` u32 ``[S, T]``, if not None, gets the tokens at their positions ``pos_start +
    base ...``, those from T on left out. ``pos_start`` int32 ``[S]``; ``vtok`` u32 ``[S, K + 1]``.
    """

    vtok: Tensor
    acc: Tensor
    brk: Tensor
    ring: Tensor
    pend: Tensor
    flags: Tensor
    pos_start: Tensor
    history: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdaptWork:
    """``depth[s, 0] = min(max(accepted + 1, floor), cap)``: how deep the next round drafts.

    ``acc`` u32 ``[S, 2]``; ``depth`` u32 ``[S, n]``: one of its own, or ``brk``.
    """

    acc: Tensor
    depth: Tensor
    floor: int
    cap: int


@dataclass(frozen=True, slots=True)
class RoundEndWork:
    """Accept, seed, rollback, commit and adapt in one kernel, in this order.

    The parts must name the same tensors for the same things. ``seed`` and ``adapt`` may be None.
    """

    accept: AcceptWork
    rollback: RollbackWork
    commit: CommitWork
    seed: SeedWork | None = None
    adapt: AdaptWork | None = None


@dataclass(frozen=True, slots=True)
class TokenRingWork:
    """``ring[s, (pos_start[s] - entry[s]) mod C] = token[s]``: plain decode's ring without a count.

    ``token`` u32 ``[S]``; ``pos_start`` and ``entry`` int32 ``[S]``; ``ring`` u32 ``[S, C]``. The
    modulus is never negative. A launch can be captured once and run for ever; that fewer than C
    tokens wait to be read is the caller's to see to.
    """

    token: Tensor
    pos_start: Tensor
    entry: Tensor
    ring: Tensor


@dataclass(frozen=True, slots=True)
class ArgmaxWork:
    """The likeliest token of each row, and its probability.

    ``logits`` float32 ``[S, R, V]``, ``tokens`` u32 ``[S, R]``, ``probabilities`` float32 ``[S,
    R]`` or None: softmax at the maximum, 1 / sum(exp(x - max)); 0 where the maximum is infinite. Of
    equals the lowest index. NaN is never chosen and has no probability; a row of NaN gives NO_TOKEN
    and 0, and ``flags`` u32 ``[S]``, if not None, gain BAD_TOKEN.
    """

    logits: Tensor
    tokens: Tensor
    probabilities: Tensor | None = None
    flags: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IotaWork:
    """``out[s, i] = counter[s] + plus + i``.

    ``counter`` int32 ``[S]``, ``out`` int32 ``[S, n]``.
    """

    counter: Tensor
    out: Tensor
    plus: int = 0


@dataclass(frozen=True, slots=True)
class CopyWork:
    """``target = source + plus``, word by word: both int32 or both u32, of one shape.

    u32 wraps around. The target may be host memory: this is how results leave the device.
    """

    source: Tensor
    target: Tensor
    plus: int = 0


@dataclass(frozen=True, slots=True)
class SetWork:
    """``target[s, index] = value``: ``target`` int32 or u32 ``[S, n]``. The value travels with the
    launch.
    """

    target: Tensor
    index: int
    value: int


@dataclass(frozen=True, slots=True)
class RunningWork:
    """Whether a round has anything to do: whether any sequence has no flag, and either room for its
    pending token (``pos < capacity``) or none pending.

    ``flags`` and ``pend`` u32 ``[S]``, ``pos`` and ``capacity`` int32 ``[S]``.
    """

    flags: Tensor
    pos: Tensor
    pend: Tensor
    capacity: Tensor


@dataclass(frozen=True, slots=True)
class NgramWork:
    """Drafts that follow the last earlier place of a sequence's last tokens.

    ``history`` u32 ``[S, T]``: the tokens at their positions; known are L = ``pos`` + 1 of them, or
    ``pos`` where ``pend`` u32 ``[S]`` is NO_TOKEN (at most T). ``pos`` int32 ``[S]``, ``drafts``
    u32 ``[S, 2K]``.

    For n from ``longest`` down to ``shortest``: the last i with i + n < L and ``history[i : i + n]
    == history[L - n : L]``. Draft j is the token at i + n + j, where tokens from L on are the
    drafts themselves, so that a loop goes on (as copies do in LZ77); probability 1. Without such an
    i every draft is NO_TOKEN, with probability 0. Prompt lookup decoding (A. Saxena, 2023).
    """

    history: Tensor
    pos: Tensor
    pend: Tensor
    drafts: Tensor
    shortest: int = 1
    longest: int = 3
