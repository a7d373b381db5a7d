"""Settings of a sequence in top-k mode. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from hsswap.errors import ConfigError
from hsswap.validation import finite, require_finite, require_flags, require_integers

PINNED_RECENT_TOKENS = 128
"""The last tokens, always chosen; with the first block they hold two thirds of the attention of a
small Llama (facts: 65-68 % of all mass at 8,192 tokens)."""


@dataclass(frozen=True, slots=True)
class TopK:
    """How a sequence attends in top-k mode.

    ``k`` blocks a KV head are chosen by the predictor, beside the first block and the last 128
    tokens. ``cache_factor``: unit slots a KV head keeps, in multiples of k; a small Llama missed 18
    to 22 % of what it chose at 1, 6 to 8 % at 2 and 3 to 4 % at 4. ``left_out_bound``: attend fewer
    than k blocks, but ``least_k``, where the predicted share left out stays within it all the same;
    None: always k. ``late_mass``: a block that is only on disk is waited for where its predicted
    share is above this for some KV head, from 0 (every block) to 1 (none but the first and those of
    the last 128 tokens). One that is not counts as left out of this step, and comes for another.

    ``stand_in``: what is left out is made up for, with the predictor ``codes``, by what rows that
    attended everything have taught: the sequence's last ones (:mod:`hsswap.lessons`; the first step
    behind a prompt takes as long as 17), or else those of the first prompt
    (:mod:`hsswap.predictor.stand_in`). False: the output is attention over the chosen blocks alone.

    The share left out is an estimate, right on average: with codes of 1/32 it said 0.149 where
    0.154 was left out, and 0.182 where 0.187 was (two texts of 8,192 tokens, a small Llama); at
    1/16 0.149 and 0.179, where 0.149 and 0.180 were. One head's is off by more, so who must not
    leave out more than a share asks for a bound well under it (by 0.075 at 1/32 and 0.03 at 1/16
    for 95 % of the heads).
    """

    k: int
    cache_factor: int = 2
    left_out_bound: float | None = None
    least_k: int = 1
    late_mass: float = 0.0
    stand_in: bool = True

    def __post_init__(self) -> None:
        require_integers(self, ("k", "cache_factor", "least_k"))
        require_finite(self, ("left_out_bound",))
        require_flags(self, ("stand_in",))
        object.__setattr__(self, "late_mass", finite(self.late_mass, "late_mass"))
        if self.k < 1:
            raise ConfigError(f"k is {self.k}; at least one block must be chosen")
        if self.cache_factor < 1:
            raise ConfigError(f"cache_factor is {self.cache_factor}; 1 and more")
        if not 0 <= self.least_k <= self.k:
            raise ConfigError(f"least_k is {self.least_k}; it must be from 0 to k ({self.k})")
        if self.left_out_bound is not None and not 0 <= self.left_out_bound <= 1:
            raise ConfigError(f"left_out_bound is {self.left_out_bound}; a share is from 0 to 1")
        if not 0 <= self.late_mass <= 1:
            raise ConfigError(f"late_mass is {self.late_mass}; a share is from 0 to 1")

    def pinned_blocks(self, block_size: int) -> int:
        """Blocks always chosen: the first, and those of the last 128 tokens."""
        return 1 + -(-PINNED_RECENT_TOKENS // block_size)

    def cache_blocks(self, block_size: int) -> int:
        """Device slots a layer takes: the pinned blocks and ``cache_factor`` times k."""
        return self.pinned_blocks(block_size) + self.cache_factor * self.k
