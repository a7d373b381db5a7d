"""The arms of ``hsswap bench decode`` on a GPU, in torch.

Arms that need no decision of the host are one CUDA graph a token. The others get the model's part
between two attentions as a graph each, so that what is compared is attention and its data, not
launches.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hsswap import Sequence
from hsswap.bench.decode_arms import (
    TRACES,
    Arm,
    Problem,
    counted_waits,
    fill_sequence,
    missed_and_left_out,
)
from hsswap.bench.lab import Lab, tell
from hsswap.bench.synthetic import BLOCK, Traits, make_trace, traits_of
from hsswap.models import LlamaConfig
from hsswap.models.torch_llama import TorchAttention, TorchLlama, random_weights
from hsswap.models.torch_step import StepAttention, captured, on_device

TOKENS_A_SLICE = 8


class TorchMaker:
    """:class:`hsswap.bench.synthetic.Maker` on a GPU."""

    def __init__(self, device: str, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """See Maker."""
        return torch.randn(shape, generator=self._generator, device=self._device)

    def take(self, array: Any) -> torch.Tensor:
        """See Maker."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def host(self, array: torch.Tensor) -> Any:
        """See Maker."""
        return array.cpu().numpy()


class TorchArms:
    """All arms over one model of random BF16 weights."""

    def __init__(self, lab: Lab, model: LlamaConfig) -> None:
        self.lab = lab
        self.model = TorchLlama(model, random_weights(model, lab.device))
        self.token = torch.zeros(1, dtype=torch.int64, device=lab.device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=lab.device)
        self.queries: list[torch.Tensor] = []
        self.cache = torch.empty(0)

    async def fill(self, problem: Problem) -> Traits:
        """See :class:`~hsswap.bench.decode_arms.Arms`."""
        s, c = problem.shape, self.model.config
        self._swap = problem.swap
        self.queries.clear()
        self.cache = torch.empty(0)  # that of the length before
        torch.cuda.empty_cache()
        shape = (c.layers, 2, c.kv_heads, s.tokens + 1, c.head_dim)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device=self.lab.device)
        traits = None
        prompts: list[torch.Tensor] = []
        for layer in range(c.layers):
            if layer >= TRACES:
                self.queries.append(self.queries[layer % TRACES])
                prompts.append(prompts[layer % TRACES])
                self.cache[layer] = self.cache[layer % TRACES]
                continue
            maker = TorchMaker(self.lab.device, layer)
            trace = make_trace(maker, s, layer)
            traits = traits or traits_of(maker, s, trace)
            self.queries.append(trace.queries.bfloat16())
            prompts.append(trace.prompt.bfloat16())
            self.cache[layer, 0, :, : s.tokens] = trace.keys.transpose(0, 1)
            self.cache[layer, 1, :, : s.tokens] = trace.values.transpose(0, 1)

        def rows(layer: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = self.cache[layer, :, :, part].transpose(1, 2)
            return keys, values

        await fill_sequence(problem, rows, lambda layer: prompts[layer])
        assert traits is not None
        torch.cuda.empty_cache()
        return traits

    async def open(
        self, problem: Problem, chosen: tuple[str, ...], undo: AsyncExitStack
    ) -> dict[str, Arm]:
        """See :class:`~hsswap.bench.decode_arms.Arms`."""
        fork = None
        if "host-decided" in chosen:
            fork = problem.sequence.fork(stream=self.lab.stream)
            await undo.enter_async_context(fork)
        problem.steps = await undo.enter_async_context(
            problem.sequence.captured(1, stream=self.lab.stream)
        )
        arms: dict[str, Arm] = {
            "dense": GraphArm(self, DenseAttention(self)),
            "top-k": GraphArm(self, StepAttention(self.model, problem.steps)),
        }
        if fork is not None:
            arms["host-decided"] = SegmentArm(self, host_decided(self, fork))
        if "copies" in chosen:
            arms["copies"] = SegmentArm(self, copies(self, problem))
        if "offloaded" in chosen:
            arms["offloaded"] = SegmentArm(self, offloaded(self))
        return arms

    async def error(self, dense: Arm, top_k: Arm) -> float:
        """See :class:`~hsswap.bench.decode_arms.Arms`."""
        outs = []
        for arm in (dense, top_k):
            assert isinstance(arm, GraphArm)
            self.turn.zero_()
            await arm.token()
            outs.append(torch.stack(arm.outs).double())
        wanted, found = outs
        return float((found - wanted).norm() / wanted.norm())

    async def waits(self, top_k: Arm) -> int:
        """See :class:`~hsswap.bench.decode_arms.Arms`. torch raises where it would wait."""
        assert isinstance(top_k, GraphArm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it does not see every kind
            torch.cuda.set_sync_debug_mode("error")
        try:
            with counted_waits(self._swap) as waits:
                for _ in range(TOKENS_A_SLICE):
                    await top_k.token()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return len(waits)

    def missed(self, problem: Problem) -> tuple[float, float]:
        """See :class:`~hsswap.bench.decode_arms.Arms`."""
        device = self.lab.device
        return missed_and_left_out(problem, lambda t: on_device(t, device).cpu().numpy())

    def run(self, attention: TorchAttention) -> None:
        """One step of the model, whose token nobody uses, and on to the next query."""
        at = self.cache.shape[3] - 1
        position = torch.full((1,), at, device=self.lab.device)
        hidden = self.model.hidden(self.token, position, attention)
        self.model.choose(hidden, self.token)
        self.turn.add_(1).remainder_(len(self.queries[0]))

    def query(self, layer: int) -> torch.Tensor:
        """The trace's, in place of the model's own: ``[1, Q, d]``."""
        return self.queries[layer].index_select(0, self.turn)


class DenseAttention:
    """Everything resident and contiguous, through ``scaled_dot_product_attention``."""

    def __init__(self, arms: TorchArms) -> None:
        self._cache = arms.cache

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """As TorchAttention; the row's K and V go to the last place."""
        cache = self._cache[layer]
        cache[0, :, -1] = keys[0]
        cache[1, :, -1] = values[0]
        return dense(queries, cache[0], cache[1])


def dense(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row ``[1, Q, d]`` over ``[H, tokens, d]``."""
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], enable_gqa=True
    )
    return out[0].transpose(0, 1)


class GraphArm:
    """A token is one graph."""

    tokens = TOKENS_A_SLICE

    def __init__(self, arms: TorchArms, attention: TorchAttention) -> None:
        self.outs: list[torch.Tensor] = []
        self._arms = arms
        self._attention = attention
        arms.run(self)  # loads what a capture may not
        self.outs.clear()
        self._graph = captured(lambda: arms.run(self))

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """As TorchAttention, with the trace's query."""
        del queries
        out = self._attention.attend(layer, self._arms.query(layer), keys, values)
        self.outs.append(out)
        return out

    async def token(self) -> None:
        """See Arm."""
        self._graph.replay()


Inner = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Awaitable[None]]
"""Attention of a layer: query, key, value, and where the output goes."""


class SegmentArm:
    """A token is a graph for each part of the model, with attention called between them."""

    tokens = 1

    def __init__(self, arms: TorchArms, inner: Inner) -> None:
        self._arms = arms
        self._inner = inner
        self._graphs: list[Any] = []
        self._calls: list[tuple[torch.Tensor, ...]] = []
        self._pool = torch.cuda.graph_pool_handle()
        arms.run(_Zeros())
        torch.cuda.synchronize()
        self._begin()
        arms.run(self)
        self._graphs[-1].capture_end()

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Ends the graph so far and begins the next one."""
        out = self._arms.model.arrays.new(tuple(queries.shape))
        self._calls.append((self._arms.query(layer), keys, values, out))
        self._graphs[-1].capture_end()
        self._begin()
        return out

    async def token(self) -> None:
        """See Arm."""
        for layer, call in enumerate(self._calls):
            self._graphs[layer].replay()
            await self._inner(layer, *call)
        self._graphs[-1].replay()


class _Zeros:
    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros_like(queries)


def host_decided(arms: TorchArms, sequence: Sequence) -> Inner:
    """The public calls: the host reads what is missing, a layer at a time, enqueues the rest."""
    stream = arms.lab.stream

    async def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        await sequence.append(layer, k, v, stream=stream)
        await sequence.attend(layer, q, out, stream=stream)

    return attend


def copies(arms: TorchArms, problem: Problem) -> Inner:
    """All k blocks are copied each step, one call a block, the best k by their mean keys.

    Blocks are chosen for the layer, as such engines do; the copies are torch's ``_foreach_copy_``,
    which issues them from C++.
    """
    c, swap = arms.model.config, problem.swap
    full = problem.shape.tokens // BLOCK
    pool = swap.pool_of(0)
    raw = torch.from_numpy(pool.blocks.memory.array())
    units = raw[:, : c.kv_heads * pool.units.unit_bytes].view(torch.bfloat16)
    host = units.view(len(raw), c.kv_heads, 2, BLOCK, c.head_dim)
    staging = torch.empty((problem.k, *host.shape[1:]), dtype=host.dtype, device=arms.lab.device)
    places = list(staging)
    slots = [pool.tier.lookup(layer, problem.sequence._indices[:full]) for layer in range(c.layers)]
    means = arms.cache[:, 0, :, : full * BLOCK].unflatten(2, (full, BLOCK)).mean(3)

    async def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        of_heads = q.view(c.kv_heads, -1, c.head_dim).sum(1)[:, :, None]
        best = (means[layer] @ of_heads).sum((0, 2)).topk(problem.k).indices.cpu().numpy()
        torch._foreach_copy_(places, [host[slot] for slot in slots[layer][best]], non_blocking=True)
        both = staging.permute(2, 1, 0, 3, 4).flatten(2, 3)  # [2, H, k * BLOCK, d], copied
        out.copy_(dense(q, both[0], both[1]))

    return attend


def offloaded(arms: TorchArms) -> Inner:
    """transformers' cache with offloading: a layer's whole K and V come and go each step."""
    device = arms.lab.device
    kept: Any
    try:
        from transformers import DynamicCache

        kept = DynamicCache(offloading=True)
        tell("offloaded: transformers.DynamicCache(offloading=True)")
    except ImportError:
        kept = OffloadedCache()
        tell("offloaded: transformers is missing; a re-implementation of its offloaded cache")
    default = torch.cuda.default_stream(device)
    default.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(default):
        for layer in range(arms.model.config.layers):
            both = arms.cache[layer, :, None, :, :-1].contiguous()
            kept.update(both[0], both[1], layer)
    torch.cuda.synchronize(device)

    async def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        current = torch.cuda.current_stream(device)
        default.wait_stream(current)
        with torch.cuda.stream(default):  # on which its copies wait
            keys, values = kept.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer)
            out.copy_(dense(q, keys[0], values[0]))
        current.wait_stream(default)

    return attend


class OffloadedCache:
    """What transformers' offloaded cache does, where transformers is missing: the next layer comes
    on a stream of its own while this one is used, and this one goes back.
    """

    def __init__(self) -> None:
        self._layers: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream()

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's K and V ``[1, H, tokens, d]`` with those of the new rows behind."""
        new = torch.stack((keys, values))
        if layer == len(self._layers):
            self._layers.append(new.to("cpu"))
            return keys, values
        default = torch.cuda.current_stream()
        default.wait_stream(self._stream)
        self._stream.wait_stream(default)
        following = (layer + 1) % len(self._layers)
        with torch.cuda.stream(self._stream):
            self._layers[following] = self._layers[following].to(new.device, non_blocking=True)
        both = torch.cat((self._layers[layer].to(new.device), new), dim=-2)
        self._layers[layer] = both.to("cpu", non_blocking=True)
        return both[0], both[1]
