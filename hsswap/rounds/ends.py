"""How a sequence of a round stream ends, and what its flags mean for who uses it."""

from __future__ import annotations

from enum import Enum

from hsswap.driver.round_operations import RoundFlag
from hsswap.errors import ArgumentError, BadDraft, HsswapError, ModelError

# As plain integers: the enum's operators take a microsecond each, for every sequence of a burst.
BAD_TOKEN, BAD_DRAFT = int(RoundFlag.BAD_TOKEN), int(RoundFlag.BAD_DRAFT)
OVERFLOW, STOPPED = int(RoundFlag.OVERFLOW), int(RoundFlag.STOPPED)


class End(Enum):
    """Why a sequence makes no more tokens."""

    STOPPED = "its last token is a stop token"
    LENGTH = "its capacity is reached"
    FAILED = "its drafter or its model failed"


def end_of(flags: int, left: int) -> End | None:
    """From a sequence's flags and the tokens that it has room for; None: it goes on."""
    if flags & (BAD_TOKEN | BAD_DRAFT | OVERFLOW):
        return End.FAILED
    if flags & STOPPED:
        return End.STOPPED
    return End.LENGTH if left <= 0 else None


def error_of(flags: int, s: int) -> HsswapError | None:
    """What a sequence's flags mean for who uses it."""
    if flags & BAD_TOKEN:
        return ModelError(
            f"sequence {s}: the model's next token is outside its vocabulary, or its logits are "
            "NaN; the tokens before it are right"
        )
    if flags & BAD_DRAFT:
        return BadDraft(
            f"sequence {s}: the drafter wrote fewer than k drafts, or a token outside the "
            "vocabulary; the tokens so far are right, go on from them with another drafter"
        )
    if flags & OVERFLOW:
        return ArgumentError(f"sequence {s}: the ring has less room than a burst can need")
    return None
