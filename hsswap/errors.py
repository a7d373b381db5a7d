"""Every error a caller of hsswap can see, in one tree.

Each message says what happened, to which block or argument, and what to do about it. Errors of
other libraries (OSError, CUDA result codes, kvikio's RuntimeError) are mapped into this tree at the
edge where they arrive and kept as ``__cause__``.
"""

from __future__ import annotations

SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """What somebody gave, as a message says it: its ``repr``, but not pages of it."""
    try:
        text = repr(value)
    except Exception:  # an int of over 4,300 digits has none
        text = f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


class HsswapError(Exception):
    """Base of all errors raised on purpose by hsswap."""


class ConfigError(HsswapError, ValueError):
    """A size, name or combination of settings that cannot work. Nothing was changed."""


class ArgumentError(HsswapError, ValueError):
    """A call's argument is wrong (dtype, shape, range, stale id). Nothing was changed."""


class ClosedError(HsswapError):
    """The object was closed, or is being closed, before or during the call."""


class DeviceError(HsswapError):
    """The device, its driver or its compiler cannot do what was asked."""


class CaptureError(HsswapError):
    """The call cannot be made while a stream's work is captured into a graph."""


class BlockIOError(HsswapError):
    """Reading or writing failed for exactly the blocks named; the rest of the store goes on.

    ``errno`` is the system's number where there was one, else 0.
    """

    def __init__(self, message: str, *, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class OutOfSpace(BlockIOError):
    """The disk, or the limit set for the store, is full."""


class CorruptBlock(BlockIOError):
    """A block came back from disk with other bytes than were written. It was not used."""


class StoreLocked(HsswapError):
    """Another process owns the store directory."""


class OutOfBlocks(HsswapError):
    """The store has no free block id left."""


class OutOfSlots(HsswapError):
    """Device or host slots are too few for the request; the message says how many are needed."""


class StaleBlockId(ArgumentError):
    """The block id was freed, or never given out."""


class SharedBlock(ArgumentError):
    """A block that others read too cannot be written; copy it, and write the copy."""


class VerifyError(HsswapError):
    """An attention output differed from the float64 reference by more than the promise allows."""


class BadDraft(HsswapError):
    """A drafter wrote too few drafts, or tokens outside the vocabulary. What was made is right."""


class ModelError(HsswapError):
    """A model file is unreadable, truncated, or of a kind that is not supported."""
