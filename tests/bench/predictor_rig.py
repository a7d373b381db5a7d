"""A tiny model's trace, and attention of it in float64 with loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.bench.predictor_contexts import Context
from hsswap.bench.predictor_traces import Sizes, Trace, trace_of
from hsswap.bench.predictor_view import LayerView
from hsswap.bf16 import U16, from_float32
from hsswap.models import Llama, open_gguf
from tests.models.tiny_llama import WORDS, Tiny, tiny_weights, write_tiny

F64 = NDArray[np.float64]
SIZES = Sizes(length=1150, tested=12, window=20)  # no multiple of a block


def tiny_model(folder: Path) -> Llama:
    tiny = Tiny(head_dim=16, rope_dims=12)
    return Llama.from_gguf(open_gguf(write_tiny(folder / "m.gguf", tiny, tiny_weights(tiny))))


def tiny_trace(model: Llama, folder: Path, seed: int = 3) -> Trace:
    tokens = np.random.default_rng(seed).integers(0, len(WORDS), SIZES.length + 1)
    context = Context("tiny", tuple(tokens.tolist()), frozenset({SIZES.length, SIZES.length - 2}))
    return trace_of(model, "tiny", context, SIZES, folder)


def random_view(rows: int = 5, length: int = 421, seed: int = 1) -> LayerView:
    """3 KV heads of 2 query heads and 12 dims."""
    random = np.random.default_rng(seed)
    return LayerView.of(0, codes(random, rows, 6, 12), codes(random, length, 3, 12), length - rows)


def codes(random: np.random.Generator, *shape: int) -> U16:
    return from_float32(random.standard_normal(shape).astype(np.float32))


def float64_weights(view: LayerView, head: int, query: int, row: int) -> F64:
    """Softmax of one row over its past, float64."""
    end = view.first + row + 1
    q = view.queries[head, query, row].astype(np.float64)
    logits = view.keys[head, :end].astype(np.float64) @ q / np.sqrt(len(q))
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Relative L2."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
