"""Real K, V and queries of a model over a context, kept in files.

A pass over 8,192 tokens costs one to two minutes of a processor core, so that what it gave is kept
under a name made of everything it depends on: model, tokens, sizes, and the version of this file.

    prompt                                  window (teacher-forced)
    0 ........ basis ............ length - window ............ length
    queries kept                                queries, from 61 rows before it on
    keys and values kept throughout         logits kept
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.bench.predictor_contexts import Context
from hsswap.bf16 import F32, U16
from hsswap.commands.decoding import dims_of
from hsswap.dims import ModelDims
from hsswap.fitting import LESSON_SPAN
from hsswap.models import Llama

TRACE_VERSION = 2
BASIS_TOKENS = 1024
"""The first tokens, from which predictors may learn; never among those tested."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of a context, of its end that is tested by every method, and of a longer end."""

    length: int = 8192
    tested: int = 96
    window: int = 256


QUICK = Sizes(length=2048, window=96)


class Trace:
    """What a dense pass left, one layer at a time from its file. BF16 codes with RoPE applied.

    ``ranked``: the layers that see everything, whose blocks are chosen; ``rope`` is theirs. The
    others see ``windows[layer]`` tokens.
    """

    def __init__(self, context: Context, sizes: Sizes, dims: ModelDims, path: Path) -> None:
        self.context, self.sizes = context, sizes
        self.name = path.stem
        self._file = np.load(path)
        self.windows = [dims.group(layer).window for layer in range(dims.layers)]
        self.ranked = [layer for layer, window in enumerate(self.windows) if window is None]
        self.rope = dims.group(self.ranked[0]).rope

    def keys(self, layer: int) -> U16:
        """``[length, kv_heads, head_dim]``."""
        return np.asarray(self._file[f"keys{layer}"])

    def values(self, layer: int) -> U16:
        """``[length, kv_heads, head_dim]``."""
        return np.asarray(self._file[f"values{layer}"])

    def basis_queries(self, layer: int) -> U16:
        """Of the first 1,024 tokens ``[1024, q_heads, head_dim]``."""
        return np.asarray(self._file[f"basis{layer}"])

    def queries(self, layer: int) -> U16:
        """Of the window ``[window, q_heads, head_dim]``."""
        return np.asarray(self._file[f"queries{layer}"])[LESSON_SPAN:]

    def lesson_queries(self, layer: int, first: int) -> U16:
        """Of the last rows before position ``first`` ``[LESSON_SPAN, q_heads, head_dim]``, which is
        in the window: the end of what is the prompt where rows from ``first`` on are tested.
        """
        at = first - (self.sizes.length - self.sizes.window)
        return np.asarray(self._file[f"queries{layer}"])[at : at + LESSON_SPAN]

    def early_queries(self, layer: int) -> U16:
        """What the layer's weights make of the layer before's input ``[window, ...]``, layer 1 on.

        The approximate queries of look-ahead (InfiniGen, arXiv 2406.19707; KVSwap).
        """
        return np.asarray(self._file[f"early{layer}"])

    def logits(self) -> F32:
        """Of the window ``[window, vocab_size]``."""
        return np.asarray(self._file["logits"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Recorder:
    """``hsswap.models.Attention``: dense, and everything that passes through is kept."""

    def __init__(self, model: Llama, sizes: Sizes) -> None:
        c = model.config
        self._dense = model.plain_attention(sizes.length)
        self._at = [0] * c.layers
        self._start = sizes.length - sizes.window - LESSON_SPAN
        kv, q = (c.kv_heads, c.head_dim), (c.q_heads, c.head_dim)
        self.arrays: dict[str, NDArray[np.generic]] = {}
        for layer in range(c.layers):
            for name, shape in (
                ("keys", (sizes.length, *kv)),
                ("values", (sizes.length, *kv)),
                ("basis", (BASIS_TOKENS, *q)),
                ("queries", (LESSON_SPAN + sizes.window, *q)),
                ("early", (sizes.window, *q)),
            ):
                self.arrays[f"{name}{layer}"] = np.zeros(shape, np.uint16)

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        """Keep, append and attend."""
        first, end = self._at[layer], self._at[layer] + len(queries)
        self._at[layer] = end
        self.arrays[f"keys{layer}"][first:end] = keys
        self.arrays[f"values{layer}"][first:end] = values
        if first < BASIS_TOKENS:
            kept = self.arrays[f"basis{layer}"][first:end]
            kept[...] = queries[: len(kept)]
        if end > self._start:
            late = max(first, self._start)
            kept = self.arrays[f"queries{layer}"][late - self._start : end - self._start]
            kept[...] = queries[late - first :]
        return self._dense.attend(layer, queries, keys, values)


def trace_of(model: Llama, model_key: str, context: Context, sizes: Sizes, folder: Path) -> Trace:
    """The trace of ``context``, from ``folder`` or from a pass of the model that is then kept.

    ``model_key`` names the weights.
    """
    tokens = np.asarray(context.tokens, np.int64)
    about = f"{TRACE_VERSION} {model_key} {sizes} {BASIS_TOKENS}".encode()
    name = hashlib.blake2b(about + tokens.tobytes(), digest_size=12).hexdigest()
    path = folder / f"{context.name.replace('/', '-')}-{name}.npz"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(path, _record(model, context, sizes))
    dims = dims_of(model.config, rope_factors=model.weights.rope_factors)
    return Trace(context, sizes, dims, path)


def _record(model: Llama, context: Context, sizes: Sizes) -> dict[str, NDArray[np.generic]]:
    recorder = _Recorder(model, sizes)
    start = sizes.length - sizes.window
    inputs = context.tokens[: sizes.length]
    model.prefill(inputs[:start], recorder)

    def keep_early(layer: int, hidden: F32) -> None:
        if layer + 1 < model.config.layers:
            early = model.layer_queries(layer + 1, hidden, start)
            recorder.arrays[f"early{layer + 1}"][...] = early

    recorder.arrays["logits"] = model.forward(
        inputs[start:], start, recorder, all_logits=True, on_layer=keep_early
    )
    return recorder.arrays


def _write_whole(path: Path, arrays: dict[str, NDArray[np.generic]]) -> None:
    """The file is there whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
