"""Rotary position embedding: which dims turn, how fast, and turning vectors there and back.

A pair of dims is one complex number, multiplied by exp(i * position * frequency) (Su et al.,
arXiv 2104.09864). Scaling for long contexts divides the frequency of each pair by a factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ConfigError
from hsswap.validation import (
    finite,
    require,
    require_finite,
    require_integers,
    require_kind,
    require_words,
)

F64 = NDArray[np.float64]
PAIR_LAYOUTS = ("halves", "adjacent")
LEAST_FACTOR = 1e-30
"""A pair that turned faster would be beyond float32."""


@dataclass(frozen=True)
class Rope:
    """How a model turns queries and keys by their positions.

    Pair i of the leading ``dims`` dims (0: all of a head) turns by ``base ** (-2 i / dims) /
    frequency_factors[i]`` radians a position; the other dims do not turn. ``pairs`` is
    ``"halves"``: dims i and i + dims / 2 (Hugging Face), or ``"adjacent"``: 2 i and 2 i + 1 (GGUF
    files of Llama). ``frequency_factors`` has one number a pair; empty: no scaling;
    :func:`llama3_factors` and :func:`yarn_factors` make them. A token's position is its place in
    the sequence.
    """

    base: float = 10000.0
    dims: int = 0
    pairs: str = "halves"
    frequency_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_finite(self, ("base",))
        require_integers(self, ("dims",))
        require_words(self, ("pairs",))
        require(self.base is not None and self.base > 1, f"base is {self.base!r}; give more than 1")
        if self.dims < 0 or self.dims % 2:
            raise ConfigError(f"dims is {self.dims}; give an even number, or 0 for the whole head")
        if self.pairs not in PAIR_LAYOUTS:
            raise ConfigError(f"pairs is {self.pairs!r}; known: {', '.join(PAIR_LAYOUTS)}")
        given = self.frequency_factors
        require_kind(given, (tuple, list), "frequency_factors", "a tuple of numbers")
        factors = tuple(finite(factor, "a frequency factor") for factor in given)
        require(
            all(factor > LEAST_FACTOR for factor in factors),
            f"frequency_factors must be above {LEAST_FACTOR}",
        )
        object.__setattr__(self, "frequency_factors", factors)

    def turned_dims(self, head_dim: int) -> int:
        """Leading dims that turn. Raises ConfigError where they do not fit the head."""
        dims = self.dims or head_dim
        if dims > head_dim or dims % 2:
            raise ConfigError(f"{dims} RoPE dims do not fit heads of {head_dim}")
        if self.frequency_factors and len(self.frequency_factors) != dims // 2:
            raise ConfigError(
                f"there are {len(self.frequency_factors)} frequency_factors; {dims // 2} pairs "
                "need one each"
            )
        return dims

    def frequencies(self, head_dim: int) -> F64:
        """Radians a position of each pair ``[pairs]``."""
        dims = self.turned_dims(head_dim)
        plain = self.base ** (-np.arange(0, dims, 2) / dims)
        return plain / np.asarray(self.frequency_factors) if self.frequency_factors else plain


def turn(vectors: F64, by: NDArray[np.int64], rope: Rope | None) -> F64:
    """``vectors`` ``[..., dk]`` turned on by ``by`` positions each, of ``vectors``' leading shape.

    Negative numbers turn back. Without a rope the vectors stay as they are.
    """
    if rope is None:
        return vectors
    head_dim = vectors.shape[-1]
    dims = rope.turned_dims(head_dim)
    half = dims // 2
    if rope.pairs == "halves":
        first, second = slice(0, half), slice(half, dims)
    else:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    angle = by[..., None] * rope.frequencies(head_dim)
    cosine, sine = np.cos(angle), np.sin(angle)
    turned = vectors.copy()
    x, y = vectors[..., first], vectors[..., second]
    turned[..., first] = x * cosine - y * sine
    turned[..., second] = x * sine + y * cosine
    return turned


def llama3_factors(
    base: float, dims: int, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Frequency factors of Llama 3.1's scaling: 1 for pairs that turn more than ``high`` times in
    the original context, ``factor`` for less than ``low`` times, and smoothly between.

    Of a Hugging Face configuration: ``rope_theta``, ``head_dim``, and of ``rope_scaling`` (type
    ``llama3``) ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
    ``original_max_position_embeddings``.
    """
    frequency = base ** (-np.arange(0, dims, 2) / dims)
    turns = original_context * frequency / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return tuple((1 / ((1 - smooth) / factor + smooth)).tolist())


def yarn_factors(
    base: float, dims: int, factor: float, original_context: int, fast: float = 32, slow: float = 1
) -> tuple[float, ...]:
    """Frequency factors of YaRN (Peng et al., arXiv 2309.00071, section 3.2 as published code
    has it: a linear ramp over pair numbers). Its scale of the logits belongs into
    ``LayerGroup.scale`` or is in the vectors already.

    ``fast`` and ``slow``: turns in the original context, ``beta_fast`` and ``beta_slow`` of a
    Hugging Face configuration.
    """

    def pair_of(turns: float) -> float:
        return dims * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_of(fast)), 0)
    last = min(math.ceil(pair_of(slow)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - first) / max(last - first, 1e-3), 0, 1)
    return tuple((1 / (ramp / factor + (1 - ramp))).tolist())
