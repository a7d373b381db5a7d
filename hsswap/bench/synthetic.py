"""Synthetic K, V and Q of a layer whose attention looks like a real model's, with its statistics.

Gaussian K and Q flatter every selector: attention is flat, and nothing repeats from step to step.
Measured on SmolLM2 at 8,192 tokens (16 of 503 blocks): consecutive queries have a cosine of 0.81 to
0.84, consecutive steps share 0.72 to 0.76 of their top 16 blocks, the first block and the last 128
tokens hold 0.65 to 0.68 of the mass, and the top 3.1 % of the others 0.57 to 0.77 of the rest.

::

    key    = rotated constant (recency) | content: shared mean + topic of the passage + noise
    query  = rotated constant           | content: constant (meets the sink) + slow part + news
    token 0: a sink, as strong as it takes for the mass of the first block and the last tokens

Content has a falling spectrum a head, flatter in some heads than in others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

BLOCK = 16
RECENT_TOKENS = 128
TOP_SHARE = 0.031
PLACE_SHARE = 4
"""One dim in so many is for positions."""

PASSAGE_TOKENS = 24
LOGIT_STD = 2.6
"""Of content over tokens, in nats: few blocks hold most of what is not resident."""

STILL_FLOOR = 0.3
"""Size of a dim of keys under which news is as large as it gets."""

RESIDENT_MASS = 0.85
"""Aimed at by the sink for a mean query; queries differ, and the mean over them is about 0.7."""

SLOW = 0.996
"""Correlation of the slow part of a query's content with that of the step before."""

NEWS = 0.68
"""Size of what is new in a query, in parts of the slow part."""

SHARED = 0.6
"""Of a query's slow part, what the heads of a group have in common."""


class Maker(Protocol):
    """Arrays of NumPy or of a GPU. Arithmetic, slices and ``@`` are the arrays' own."""

    def normal(self, shape: tuple[int, ...]) -> Any:
        """N(0, 1), float32."""
        ...

    def take(self, array: NDArray[Any]) -> Any:
        """The same numbers, there."""
        ...

    def host(self, array: Any) -> NDArray[np.float32]:
        """The same numbers in NumPy."""
        ...


class HostMaker:
    """NumPy's."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def normal(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """See :class:`Maker`."""
        return self._random.standard_normal(shape, np.float32)

    def take(self, array: NDArray[Any]) -> NDArray[Any]:
        """See :class:`Maker`."""
        return array

    def host(self, array: Any) -> NDArray[np.float32]:
        """See :class:`Maker`."""
        return np.asarray(array)


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's heads, the tokens before the first step, and how many of the first tokens have
    queries too (a prompt, for a predictor that must see one).
    """

    q_heads: int
    kv_heads: int
    dim: int
    tokens: int
    steps: int
    prompt: int = 0

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def places(self) -> int:
        """Dims for positions, an even number."""
        return self.dim // PLACE_SHARE // 2 * 2


@dataclass(frozen=True, slots=True)
class Trace:
    """``keys`` and ``values`` ``[tokens, H, d]``, ``queries`` ``[steps, Q, d]`` and ``prompt``
    ``[prompt, Q, d]``, float32. Dims for positions come first and turn as RoPE of base 10,000 with
    adjacent pairs does; the others do not turn.
    """

    keys: Any
    values: Any
    queries: Any
    prompt: Any


def make_trace(maker: Maker, shape: Shape, seed: int) -> Trace:
    """One layer's; ``seed`` for its spectra and topics."""
    random = np.random.default_rng(seed)
    s, content = shape, shape.dim - shape.places
    # Size of each dim of content: 1 / i^a, scaled to a mean square of 1; a differs by head.
    falling = np.arange(1, content + 1.0) ** -random.uniform(0.2, 0.9, (s.kv_heads, 1))
    falling /= np.sqrt((falling**2).mean(1, keepdims=True))
    size = maker.take(falling.astype(np.float32))
    mean = maker.take((2.0 * falling * random.standard_normal(falling.shape)).astype(np.float32))
    passage = maker.take(np.arange(s.tokens) // PASSAGE_TOKENS)
    topics = maker.normal((s.tokens // PASSAGE_TOKENS + 1, s.kv_heads, s.dim))
    keys = maker.normal((s.tokens, s.kv_heads, s.dim))
    keys *= 0.5
    keys += topics[passage]
    keys[..., s.places :] *= size
    keys[..., s.places :] += mean
    constant = np.sqrt(0.5) * random.standard_normal((s.kv_heads, s.places // 2, 2)).astype(
        np.float32
    )
    cos, sin = (maker.take(table) for table in _angles(0, s.tokens, s.places // 2))
    a, b = maker.take(constant[..., 0].copy()), maker.take(constant[..., 1].copy())
    keys[..., 0 : s.places : 2] = a * cos - b * sin
    keys[..., 1 : s.places : 2] = a * sin + b * cos
    values = maker.normal((s.tokens, s.kv_heads, s.dim))
    values += maker.normal((s.tokens // PASSAGE_TOKENS + 1, s.kv_heads, s.dim))[passage]
    queries, prompt, sink = _queries(random, shape, falling, constant)
    # Logits of content get their spread.
    sample = maker.host(keys[:: max(1, s.tokens // 2048), :, s.places :])
    for head in range(s.kv_heads):
        of_head = slice(head * s.group, (head + 1) * s.group)
        logits = queries[:, of_head, s.places :].reshape(-1, content) @ sample[:, head].T
        factor = LOGIT_STD * s.dim**0.5 / logits.std(1).mean()
        queries[:, of_head, s.places :] *= factor
        prompt[:, of_head, s.places :] *= factor
        sink[head] *= factor
    _add_sink(maker, shape, keys, queries, sink)
    return Trace(keys, values, maker.take(queries), maker.take(prompt))


@lru_cache(maxsize=4)
def _angles(start: int, stop: int, pairs: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of RoPE's angles at positions, ``[n, 1, pairs]`` each."""
    angle = np.outer(np.arange(start, stop), 10000.0 ** -(np.arange(pairs) / pairs))[:, None]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _queries(
    random: np.random.Generator, s: Shape, falling: F64, constant: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Queries of the steps and of the prompt, and each KV head's direction that the sink will have.

    Those of the prompt have nothing in common with the one before.
    """
    content = s.dim - s.places

    def draw(count: int) -> F64:
        own = random.standard_normal((count, s.kv_heads, s.group, content))
        common = random.standard_normal((count, s.kv_heads, 1, content))
        mixed: F64 = np.sqrt(SHARED) * common + np.sqrt(1 - SHARED) * own
        return mixed

    slow = draw(1)
    towards = random.standard_normal((s.kv_heads, 1, content))
    # News is where keys vary least: the ranking of blocks moves less than the query does.
    still = 1.0 / np.maximum(falling, STILL_FLOOR) ** 2
    still /= np.sqrt((still**2).mean(1, keepdims=True))
    contents = []
    for _ in range(s.steps):
        slow = SLOW * slow + np.sqrt(1 - SLOW**2) * draw(1)
        contents.append(slow + NEWS * still[:, None] * draw(1) + towards)
    steps = np.concatenate(contents)
    prompt = draw(s.prompt) + NEWS * still[:, None] * draw(s.prompt) + towards
    return (
        _placed(s, steps, constant, s.tokens),
        _placed(s, prompt, constant, 0),
        towards[:, 0].astype(np.float32),
    )


def _placed(
    s: Shape, content: F64, constant: NDArray[np.float32], start: int
) -> NDArray[np.float32]:
    """Queries ``[n, Q, d]`` at positions from ``start`` on, with this content."""
    out = np.empty((len(content), s.kv_heads, s.group, s.dim), np.float32)
    cos, sin = _angles(start, start + len(content), s.places // 2)
    a, b = constant[..., 0], constant[..., 1]
    out[..., 0 : s.places : 2] = 2.0 * (a * cos - b * sin)[:, :, None]
    out[..., 1 : s.places : 2] = 2.0 * (a * sin + b * cos)[:, :, None]
    out[..., s.places :] = content
    return out.reshape(len(content), s.q_heads, s.dim)


def _add_sink(
    maker: Maker,
    s: Shape,
    keys: Any,
    queries: NDArray[np.float32],
    towards: NDArray[np.float32],
) -> None:
    """Token 0's key: along the queries' constant part, as strong as resident mass is to be."""
    scale = s.dim**-0.5
    first = max(BLOCK, s.tokens - RECENT_TOKENS)
    sink = np.zeros((s.kv_heads, s.dim), np.float32)
    for head in range(s.kv_heads):
        of_head = slice(head * s.group, (head + 1) * s.group)
        q = queries[[0, s.steps // 2, -1], of_head].reshape(-1, s.dim)
        logits = maker.host(keys[:, head] @ maker.take(np.ascontiguousarray(q.T))) * scale
        far, near = log_sum(logits[BLOCK:first]), log_sum(logits[first:])
        wanted = far + np.log(RESIDENT_MASS / (1 - RESIDENT_MASS))
        own = np.log(np.maximum(np.exp(wanted) - np.exp(near), np.exp(far - 2.0))).mean()
        along = (q[:, s.places :] @ towards[head]).mean() * scale
        sink[head, s.places :] = towards[head] * (own / along)
    keys[0] = maker.take(sink)


def log_sum(logits: NDArray[Any]) -> F64:
    """Log of the sum of exponentials down the first axis."""
    top = logits.max(0)
    total: F64 = np.log(np.exp(logits - top).sum(0, dtype=np.float64)) + top
    return total


@dataclass(frozen=True, slots=True)
class Traits:
    """What a trace looks like, as means over query heads and steps; to be shown beside results."""

    query_cosine: float
    top_overlap: float
    resident_mass: float
    top_mass_of_rest: float


def traits_of(maker: Maker, s: Shape, trace: Trace, *, steps: int = 3) -> Traits:
    """From dense attention in float32 of every query head, at the first steps."""
    blocks = s.tokens // BLOCK
    recent = (s.tokens - RECENT_TOKENS) // BLOCK
    top = max(1, round(TOP_SHARE * (recent - 1)))
    queries = maker.host(trace.queries)[:steps]
    turn = queries / np.linalg.norm(queries, axis=2, keepdims=True)
    resident, rest, overlap = [], [], []
    for head in range(s.kv_heads):
        q = queries[:, head * s.group : (head + 1) * s.group].reshape(-1, s.dim)
        logits = maker.host(trace.keys[:, head] @ maker.take(np.ascontiguousarray(q.T)))
        weights = np.exp((logits - logits.max(0)) * s.dim**-0.5)
        mass = weights[: blocks * BLOCK].reshape(blocks, BLOCK, -1).sum(1)
        mass /= mass.sum(0)
        far = mass[1:recent]
        resident.append(1.0 - far.sum(0))
        order = np.sort(far, 0)[::-1]
        rest.append(order[:top].sum(0) / order.sum(0))
        # Blocks are chosen a KV head, by the mean over its query heads.
        of_steps = far.reshape(len(far), steps, s.group).mean(2)
        chosen = [set(np.argsort(column)[-top:].tolist()) for column in of_steps.T]
        overlap += [len(a & b) / top for a, b in pairwise(chosen)]
    return Traits(
        float((turn[1:] * turn[:-1]).sum(2).mean()),
        float(np.mean(overlap)),
        float(np.mean(resident)),
        float(np.mean(rest)),
    )
