"""A model that decodes through the swap: prefill, then greedy tokens, with what each step cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hsswap.commands.verify import AttentionVerifier
from hsswap.config import LayerGroup, ModelDims, SwapConfig
from hsswap.metrics import SwapStatistics
from hsswap.models import Arrays, HostArrays, LlamaConfig, TokenIds
from hsswap.rope import Rope
from hsswap.rounds import Acceptance
from hsswap.sync import BlockingSequence, BlockingSwap


def _nothing() -> None:
    pass


class Model(Protocol):
    """What a decoder runs: :class:`hsswap.models.Llama`, or the one in torch, with arrays to suit
    (the :class:`~hsswap.models.Attention` it is given takes and returns them).
    """

    @property
    def config(self) -> LlamaConfig:
        """Its sizes."""
        ...

    @property
    def arrays(self) -> Arrays:
        """How its arrays meet the swap."""
        ...

    def forward(
        self, tokens: TokenIds, position: int, attention: Any, *, all_logits: bool = False
    ) -> Any:
        """Logits."""
        ...

    def prefill(
        self,
        tokens: TokenIds,
        attention: Any,
        *,
        position: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Logits after a prompt."""
        ...

    def decode(self, token: int, position: int, attention: Any) -> int:
        """The likeliest next token."""
        ...

    def plain_attention(self, capacity_tokens: int) -> Any:
        """The baseline's attention."""
        ...


def dims_of(
    config: LlamaConfig,
    rope_factors: NDArray[np.float32] | None = None,
    kv_dtype: str = "",
) -> ModelDims:
    """The KV cache of a Llama, whose weights may have ``rope_factors`` ``[rope_dims / 2]``, kept as
    ``kv_dtype`` (by default BF16).

    Raises ConfigError for a head_dim that cannot be swapped.
    """
    windows = [config.window_of(layer) for layer in range(config.layers)]
    groups, first = [], 0
    for window, alike in groupby(windows):
        base, factor = config.rope_of(first)
        factors = np.full(config.rope_dims // 2, factor)
        if rope_factors is not None:
            factors = factors * rope_factors
        rope = Rope(base, config.rope_dims, "adjacent", tuple(factors.tolist()))
        layers = len(list(alike))
        first += layers
        group = LayerGroup(
            layers,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            window=window,
            rope=rope,
            kv_dtype=kv_dtype,
        )
        groups.append(group)
    return ModelDims(tuple(groups))


class SwapAttention:
    """``hsswap.models.Attention`` through a swap's sequence: no K or V is kept here.

    ``arrays`` are the model's: on a GPU nothing is waited for, work is in stream order. ``exact``
    as in :meth:`hsswap.Sequence.attend`. ``verifier``, if given, gets a copy of every
    call. ``checkpoint`` is called before each layer, where nothing is under way; what it raises
    passes through. ``left_out`` gathers the mass that top-k left out, one array a call.
    """

    def __init__(
        self,
        sequence: BlockingSequence,
        *,
        arrays: Arrays | None = None,
        verifier: AttentionVerifier | None = None,
        checkpoint: Callable[[], None] = _nothing,
    ) -> None:
        self.exact: bool | None = None
        self._arrays = arrays or HostArrays()
        self.left_out: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
        self._sequence = sequence
        self._verifier = verifier
        self._checkpoint = checkpoint

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        """Append and attend; in host memory it returns when the output is written. Raises as the
        swap does.
        """
        self._checkpoint()
        arrays, stream = self._arrays, self._arrays.stream
        self._sequence.append(layer, arrays.for_swap(keys), arrays.for_swap(values), stream=stream)
        out = arrays.new((*queries.shape[:2], values.shape[2]))
        result = self._sequence.attend(
            layer, arrays.for_swap(queries), arrays.for_swap(out), exact=self.exact, stream=stream
        )
        if stream is None:
            result.synchronize()
        if result.chosen is not None:
            self.left_out.append(result.left_out_mass)
        if self._verifier is not None:
            q, k, v, o = (arrays.on_host(array) for array in (queries, keys, values, out))
            self._verifier.record(layer, q, k, v, o, result.chosen)
        return out


@dataclass(frozen=True, slots=True)
class Step:
    """What one decoded token cost. Blocks over all layers: ``resident`` in device or host slots,
    ``ahead`` read from disk before they were asked for, ``waited`` for.
    """

    seconds: float
    resident: int
    ahead: int
    waited: int

    @property
    def hit_rate(self) -> float:
        """The share of the blocks that nothing waited for."""
        total = self.resident + self.ahead + self.waited
        return 1.0 if total == 0 else 1.0 - self.waited / total

    def shared_by(self, tokens: int) -> list[Step]:
        """One step for each of the tokens that came of it at once."""
        counts = np.array([self.resident, self.ahead, self.waited])
        shares = np.diff(np.outer(np.arange(tokens + 1), counts) // max(1, tokens), axis=0)
        return [Step(self.seconds / tokens, *share) for share in shares.tolist()]

    @classmethod
    def between(cls, before: SwapStatistics, after: SwapStatistics, seconds: float) -> Step:
        """From the swap's counts. A block read ahead of need and one that stayed in its host slot
        count alike there; as many as were read and not waited for count as read ahead.
        """
        host = after.host_hits - before.host_hits
        waited = after.misses - before.misses
        read = after.blocks_read - before.blocks_read
        ahead = min(host, max(0, read - waited))
        resident = after.device_hits - before.device_hits + host - ahead
        return cls(seconds, resident, ahead, waited)


@dataclass(slots=True)
class Speculated:
    """How drafts fared: what was asked for, and why bursts had fewer rounds, if they had."""

    drafter: str
    k: int
    rounds: int
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0, 0, 0))
    why: str = ""


@dataclass(slots=True)
class Run:
    """One prompt and what came of it. ``tokens`` are the generated ids.

    ``decode_s`` is the time in the model and the swap alone: neither verification nor printing.
    ``prefix_tokens`` of the prompt were stored by an earlier run. ``must_read_bytes``: what exact
    mode cannot do without, see :func:`must_read_blocks`.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    prefix_tokens: int = 0
    must_read_bytes: int = 0
    left_out_mean: float = 0.0
    left_out_max: float = 0.0
    statistics: SwapStatistics | None = None
    speculated: Speculated | None = None

    @property
    def context_tokens(self) -> int:
        """Tokens of the sequence at the end."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second; the first token is prefill's and does not count."""
        return len(self.steps) / self.decode_s if self.decode_s > 0.0 else 0.0


def must_read_blocks(config: SwapConfig, position: int) -> int:
    """Blocks that a pass through all layers at ``position`` must read from disk in exact mode.

    Every full block is attended, and at most all slots, device and host, can have kept one since
    the last pass. A real run reads somewhat more: its ring and its buffers are slots too.
    """
    full = config.dims.layers * (position // config.dims.block_size)
    return max(0, full - config.device_slots - config.host_slots)


class Decoder:
    """Runs one prompt through a model and a fresh sequence of a swap, in the calling thread."""

    def __init__(
        self,
        model: Model,
        swap: BlockingSwap,
        attention: SwapAttention,
        *,
        verifier: AttentionVerifier | None = None,
        checkpoint: Callable[[], None] = _nothing,
    ) -> None:
        self._model = model
        self._swap = swap
        self._attention = attention
        self._verifier = verifier
        self._checkpoint = checkpoint

    def tokens(
        self,
        run: Run,
        prompt: list[int],
        count: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[int]:
        """Greedy tokens as they are made, at most ``count``; ``run`` is filled in meanwhile.

        Ends after a token of ``stop_ids``.
        """
        token = self._prefill(run, prompt, progress)
        run.tokens.append(token)
        yield token
        if count > 1 and token not in stop_ids:
            yield from self._rest(run, prompt, count, stop_ids)
        run.statistics = self._swap.statistics()
        if self._attention.left_out:
            left_out = np.stack(self._attention.left_out)
            run.left_out_mean, run.left_out_max = float(left_out.mean()), float(left_out.max())

    def _rest(
        self, run: Run, prompt: list[int], count: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        """The tokens behind the first, which ``run`` has already."""
        while len(run.tokens) < count and run.tokens[-1] not in stop_ids:
            run.tokens.append(self._step(run, run.tokens[-1]))
            yield run.tokens[-1]

    def _prefill(
        self, run: Run, prompt: list[int], progress: Callable[[int, int], None] | None
    ) -> int:
        self._attention.exact = True
        config = self._swap.config
        position = run.prefix_tokens
        verify_s = 0.0

        def after_chunk(done: int, total: int) -> None:
            nonlocal position, verify_s
            self._count_must_read(run, config, position)
            position = run.prefix_tokens + done
            verify_s += self._verify()
            if progress is not None:
                progress(done, total)

        start = time.perf_counter()
        logits = self._model.prefill(
            prompt[position:], self._attention, position=position, progress=after_chunk
        )
        run.prefill_s = time.perf_counter() - start - verify_s
        self._attention.exact = None
        return int(logits.argmax())

    def _step(self, run: Run, token: int) -> int:
        position = run.context_tokens - 1
        before = self._swap.statistics()
        start = time.perf_counter()
        following = self._model.decode(token, position, self._attention)
        seconds = time.perf_counter() - start
        run.decode_s += seconds
        run.steps.append(Step.between(before, self._swap.statistics(), seconds))
        self._count_must_read(run, self._swap.config, position)
        self._verify()
        return following

    def _verify(self) -> float:
        """Seconds it took."""
        if self._verifier is None:
            return 0.0
        start = time.perf_counter()
        self._verifier.check(self._checkpoint)
        return time.perf_counter() - start

    @staticmethod
    def _count_must_read(run: Run, config: SwapConfig, position: int) -> None:
        block_bytes = config.dims.block_bytes(config.dims.groups[0])
        run.must_read_bytes += must_read_blocks(config, position) * block_bytes


def count_agreeing(model: Model, prompt: list[int], generated: list[int]) -> int:
    """How many of the generated tokens the same model with plain attention would choose too.

    The plain model gets the generated tokens as input (teacher forcing), all in one pass after the
    prompt, so that one disagreement does not make all that follow disagree.
    """
    plain = model.plain_attention(len(prompt) + len(generated))
    choices = [int(model.prefill(prompt, plain).argmax())]
    if len(generated) > 1:
        logits = model.forward(generated[:-1], len(prompt), plain, all_logits=True)
        choices += logits.argmax(-1).tolist()
    return sum(a == b for a, b in zip(choices, generated, strict=True))
