"""Settings of the predictor of top-k mode. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from hsswap.codec import PAGE_BLOCKS, planes_of_budget
from hsswap.validation import require, require_finite, require_integers, require_words


@dataclass(frozen=True)
class PredictorConfig:
    """What top-k mode ranks blocks with; its codes of the keys stay in device memory.

    ``kind`` ``"codes"``: a few bits a dim in a basis that the first prompt makes, as many as
    ``metadata_ratio`` (1/128 to 1/4) of the bytes of K and V. They grow with the blocks. It needs
    ``LayerGroup.rope`` of a model with RoPE, and to see a prompt's queries: append and attend in
    chunks. ``context_tokens``: the longest sequence; None: the store's capacity. One far longer
    than any sequence costs some recall, a shorter one nearly all.

    ``kind`` ``"projection"``: a random matrix ``[head_dim, rank]`` from ``seed``; ``rank`` is 1 to
    128, ``2 * rank`` bytes for each token, layer and KV head of the store's capacity.
    """

    kind: str = "codes"
    metadata_ratio: float = 1 / 32
    context_tokens: int | None = None
    rank: int = 32
    seed: int = 0xCAFEF00D

    def __post_init__(self) -> None:
        require_integers(self, ("rank", "seed"))
        require_words(self, ("kind",))
        known = ("codes", "projection")
        require(self.kind in known, f"kind {self.kind!r} is unknown; known: {', '.join(known)}")
        require_finite(self, ("metadata_ratio",))
        require(
            self.metadata_ratio is not None and 1 / 128 <= self.metadata_ratio <= 1 / 4,
            f"metadata_ratio is {self.metadata_ratio}; it must be from 1/128 to 1/4",
        )
        if self.context_tokens is not None:
            require_integers(self, ("context_tokens",))
            require(self.context_tokens >= 1, f"context_tokens is {self.context_tokens}; 1 or more")
        require(1 <= self.rank <= 128, f"rank is {self.rank}; it must be from 1 to 128")
        require(self.seed >= 0, f"seed is {self.seed}; it cannot be negative")

    def code_bytes(self, *, heads: int, elements: int, blocks: int, block_size: int) -> int:
        """Bytes of codes of so many block ids. ``heads``: KV heads of all layers; ``elements``: of
        K and V of a token in all of them.
        """
        if self.kind == "projection":
            return 2 * self.rank * heads * blocks * block_size
        pages = -(-blocks // PAGE_BLOCKS)
        planes = planes_of_budget(elements, heads, self.metadata_ratio)
        return 2 * planes * block_size * pages * PAGE_BLOCKS
