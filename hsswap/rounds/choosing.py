"""How tokens are chosen from logits: the likeliest, or at random."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real

from hsswap.errors import ArgumentError, shown


class Choosing(Enum):
    """How a round stream chooses, and so what its drafts are held against."""

    GREEDY = "greedy"
    """The likeliest token."""

    SAMPLE = "sample"
    """A token at random, whose numbers follow from seed and position alone: the same tokens for a
    seed whatever the drafter, K and M. A draft stands if it is that token; a drafter that races
    with the same numbers agrees the more often, the more alike the distributions (M. Daliri et al.,
    2408.07978), and one that is certain of its drafts does as well as it can."""

    REJECT = "reject"
    """Speculative sampling by rejection: drafts drawn from the drafter's distribution stand as
    often as is possible, but what is chosen depends on the drafts too."""


FLOAT32_MOST = 2.0**128 - 2.0**104


@dataclass(frozen=True, slots=True)
class Choice:
    """How one sequence chooses. ``temperature`` 0: greedily. ``top_k`` 0, ``top_p`` 1 and ``min_p``
    0 leave nothing out; filters apply in this order. ``seed`` is under 2**64.

    Raises ArgumentError for values that mean nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), Real):
                raise ArgumentError(f"{name} is {shown(getattr(self, name))}; give a number")
        for name in ("top_k", "seed"):
            if not isinstance(getattr(self, name), Integral):
                raise ArgumentError(f"{name} is {shown(getattr(self, name))}; give a whole number")
        if not 0 <= self.temperature <= FLOAT32_MOST:
            raise ArgumentError(f"temperature is {shown(self.temperature)}; 0 or more, in float32")
        if not 0 <= self.top_k < 1 << 32:
            raise ArgumentError(f"top_k is {shown(self.top_k)}; 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p is {shown(self.top_p)}; more than 0, at most 1 (all)")
        if not 0 <= self.min_p <= 1:
            raise ArgumentError(f"min_p is {shown(self.min_p)}; 0 (all) to 1")
        if not 0 <= self.seed < 1 << 64:
            raise ArgumentError(f"seed is {shown(self.seed)}; 0 to 2**64 - 1")


GREEDY = Choice()
