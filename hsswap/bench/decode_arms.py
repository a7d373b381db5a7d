"""The arms of ``hsswap bench decode``: what all share, and those of the host device in NumPy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hsswap import HighSpeedSwap, Sequence
from hsswap.bench.lab import Lab
from hsswap.bench.synthetic import HostMaker, Shape, Trace, Traits, make_trace, traits_of
from hsswap.bf16 import U16, from_float32
from hsswap.driver.base import Event, Stream
from hsswap.models import Llama, LlamaConfig, PlainAttention
from hsswap.models.llama_weights import LayerWeights, LlamaWeights
from hsswap.predictor.codes import Learned

if TYPE_CHECKING:
    from hsswap.calibrating import Calibration
    from hsswap.captured import CapturedSteps

FILL_ROWS = 4096
TRACES = 8
"""Layers with a trace of their own; those behind them have these again, in other memory."""


@dataclass(slots=True)
class Problem:
    """One length: a top-k sequence of ``shape.tokens`` tokens, which the arms open and fork."""

    lab: Lab
    swap: HighSpeedSwap
    sequence: Sequence
    shape: Shape
    k: int
    steps: CapturedSteps | None = None


class Arm(Protocol):
    """One way to decode. ``tokens``: how many a slice has."""

    tokens: int

    async def token(self) -> None:
        """One whole step, enqueued. The next one has another query."""
        ...


class Arms(Protocol):
    """All arms of a device."""

    async def fill(self, problem: Problem) -> Traits:
        """K and V in every layer of the sequence, and of what is resident."""
        ...

    async def open(
        self, problem: Problem, chosen: tuple[str, ...], undo: AsyncExitStack
    ) -> dict[str, Arm]:
        """The arms by name: "dense", "top-k", then those chosen, as far as there are any."""
        ...

    async def error(self, dense: Arm, top_k: Arm) -> float:
        """Relative L2 distance of top-k's attention from dense, for one query, over all layers."""
        ...

    async def waits(self, top_k: Arm) -> int:
        """How often the host waits for the device in one token."""
        ...

    def missed(self, problem: Problem) -> tuple[float, float]:
        """Units that the last token missed and mass that it left out, a layer."""
        ...


def arms_for(lab: Lab, model: LlamaConfig) -> Arms:
    """The arms of the lab's device, with a model of random weights."""
    if lab.on_gpu:
        from hsswap.bench.decode_torch import TorchArms

        return TorchArms(lab, model)
    return HostArms(model)


Rows = Callable[[int, slice], tuple[Any, Any]]
"""K and V of some rows of a layer, as the swap takes them."""


async def fill_sequence(problem: Problem, rows: Rows, prompt: Callable[[int], Any]) -> None:
    """Append all K and V; a predictor that must see a prompt's queries is shown one first.

    Layers with the same trace share what the predictor learns (:func:`learn_once`).
    """
    lab, swap, sequence, shape = problem.lab, problem.swap, problem.sequence, problem.shape
    layers = range(swap.config.dims.layers)
    start = shape.prompt
    if start:
        assert swap.calibration is not None
        learn_once(swap.calibration, TRACES)
        for layer in layers:
            await sequence.append(layer, *rows(layer, slice(0, start)), stream=lab.stream)
            queries = prompt(layer)
            out = lab.arrays.for_swap(lab.arrays.new(tuple(queries.shape)))
            result = await sequence.attend(layer, queries, out, exact=True, stream=lab.stream)
            await result.done()
        await swap.calibration.basis()
    for layer in layers:
        for first in range(start, shape.tokens, FILL_ROWS):
            part = slice(first, min(first + FILL_ROWS, shape.tokens))
            await sequence.append(layer, *rows(layer, part), stream=lab.stream)


def learn_once(calibration: Calibration, traces: int) -> None:
    """Have the first ``traces`` layers learn, and those behind them take over what these learned.

    For layers that have the same traces again: what an 8B model's 256 heads learn takes a thread
    over a minute.
    """
    learn = calibration._learn

    def learn_some(with_queries: bool) -> Learned:
        layers = len(calibration._keys)
        calibration._keys, calibration._queries = (
            shown[:traces] for shown in (calibration._keys, calibration._queries)
        )
        learned = learn(with_queries)
        times = -(-layers // len(calibration._keys))
        heads = len(learned.codecs) // len(calibration._keys) * layers
        return Learned((learned.codecs * times)[:heads], (learned.stand_ins * times)[:heads])

    calibration._learn = learn_some  # type: ignore[method-assign]


@contextmanager
def counted_waits(swap: HighSpeedSwap) -> Iterator[list[str]]:
    """A list that grows by one whenever anybody waits for the swap's device."""
    waits: list[str] = []
    stream = swap.stream_of(None)
    kinds: tuple[tuple[type, str], ...] = (
        (type(stream.record()), "wait"),
        (type(stream.record()), "synchronize"),
        (type(stream), "synchronize"),
    )
    before = [(kind, name, getattr(kind, name)) for kind, name in kinds]

    def counting(name: str, method: Any) -> Any:
        def call(self: Event | Stream) -> Any:
            waits.append(name)
            return method(self)

        return call

    try:
        for kind, name, method in before:
            setattr(kind, name, counting(name, method))
        yield waits
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


def missed_and_left_out(problem: Problem, read: Any) -> tuple[float, float]:
    """From the tables of captured steps; ``read(tensor)`` gives a NumPy array."""
    assert problem.steps is not None
    missing, left_out = [], []
    for layer, captured in enumerate(problem.steps._layers):
        mass = problem.steps.left_out_mass(layer)
        if mass is not None:
            missing.append(int(read(captured._tensor("missing")).sum()))  # type: ignore[attr-defined]
            left_out.append(float(read(mass).mean()))
    return float(np.mean(missing)), float(np.mean(left_out))


def random_llama(config: LlamaConfig) -> Llama:
    """A NumPy model of random weights."""
    random = np.random.default_rng(0)
    c = config

    def matrix(rows: int, columns: int) -> Any:
        return random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    heads = (c.q_heads + 2 * c.kv_heads) * c.head_dim
    ones = np.ones(c.width, np.float32)
    layers = tuple(
        LayerWeights(
            ones,
            matrix(heads, c.width),
            matrix(c.width, c.q_heads * c.head_dim),
            ones,
            matrix(2 * c.ffn_width, c.width),
            matrix(c.width, c.ffn_width),
        )
        for _ in range(c.layers)
    )
    embedding, output = matrix(c.vocab_size, c.width), matrix(c.vocab_size, c.width)
    return Llama(c, LlamaWeights(embedding, layers, ones, output, None))


class HostArms:
    """Arms of the host device: a check that the bench works, with figures of no interest."""

    def __init__(self, model: LlamaConfig) -> None:
        self._model = random_llama(model)
        self._queries: list[U16] = []
        self._traces: list[Trace] = []

    async def fill(self, problem: Problem) -> Traits:
        """See :class:`Arms`."""
        traits = None
        for layer in range(self._model.config.layers):
            maker = HostMaker(layer % TRACES)
            trace = make_trace(maker, problem.shape, layer % TRACES)
            traits = traits or traits_of(maker, problem.shape, trace)
            self._traces.append(trace)
            self._queries.append(from_float32(trace.queries))
        await fill_sequence(
            problem, self._codes, lambda layer: from_float32(self._traces[layer].prompt)
        )
        assert traits is not None
        return traits

    def _codes(self, layer: int, part: slice = slice(None)) -> tuple[U16, U16]:
        trace = self._traces[layer]
        return from_float32(trace.keys[part]), from_float32(trace.values[part])

    async def open(
        self, problem: Problem, chosen: tuple[str, ...], undo: AsyncExitStack
    ) -> dict[str, Arm]:
        """See :class:`Arms`. Of D2 only the host-decided arm."""
        c, tokens = self._model.config, problem.shape.tokens
        plain = PlainAttention(c.layers, c.kv_heads, c.head_dim, capacity_tokens=tokens + 64)
        for layer in range(c.layers):
            keys, values = self._codes(layer)
            plain.attend(layer, self._queries[layer][:1], keys[:1], values[:1])
            plain._append(layer, keys[1:], values[1:])
        arms: dict[str, Arm] = {"dense": HostArm(self, problem, plain)}
        if "host-decided" in chosen:
            fork = await undo.enter_async_context(problem.sequence.fork())
            arms["host-decided"] = HostArm(self, problem, _Eager(fork))
        stream = undo.enter_context(problem.swap.device.stream())
        problem.steps = await undo.enter_async_context(problem.sequence.captured(1, stream=stream))
        arms["top-k"] = HostArm(self, problem, _Stepping(problem.steps, stream))
        return dict(sorted(arms.items(), key=lambda item: ORDER.index(item[0])))

    async def error(self, dense: Arm, top_k: Arm) -> float:
        """See :class:`Arms`."""
        outs = []
        for arm in (dense, top_k):
            assert isinstance(arm, HostArm)
            arm.turn = 0
            await arm.token()
            outs.append(np.stack(arm.outs).view(np.uint16).astype(np.uint32) << 16)
        wanted, found = (out.view(np.float32).astype(np.float64) for out in outs)
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    async def waits(self, top_k: Arm) -> int:
        """See :class:`Arms`. The NumPy model looks at every layer's result."""
        assert isinstance(top_k, HostArm)
        with counted_waits(top_k.problem.swap) as waits:
            await top_k.token()
        return len(waits)

    def missed(self, problem: Problem) -> tuple[float, float]:
        """See :class:`Arms`."""
        return missed_and_left_out(problem, lambda tensor: tensor.array())


ORDER = ("dense", "top-k", "host-decided", "copies", "offloaded")


class HostArm:
    """One arm in NumPy: the model with the trace's queries in place of its own."""

    tokens = 1

    def __init__(self, arms: HostArms, problem: Problem, attention: Any) -> None:
        self.problem = problem
        self.turn = 0
        self.outs: list[U16] = []
        self._arms = arms
        self._attention = attention

    async def token(self) -> None:
        """See :class:`Arm`."""
        self.outs.clear()
        decode = self._arms._model.decode
        await asyncio.to_thread(decode, self.turn % 50, self.problem.shape.tokens, self)
        self.turn = (self.turn + 1) % self.problem.shape.steps

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        """As :class:`hsswap.models.Attention`."""
        del queries
        query = self._arms._queries[layer][self.turn][None]
        out: U16 = self._attention.attend(layer, np.ascontiguousarray(query), keys, values)
        self.outs.append(out)
        return out


class _Stepping:
    """Captured steps, run one by one."""

    def __init__(self, steps: CapturedSteps, stream: Stream) -> None:
        self._steps, self._stream = steps, stream

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        out = np.empty_like(queries)
        self._steps.append(layer, keys, values, stream=self._stream)
        self._steps.attend(layer, queries, out, stream=self._stream)
        self._stream.synchronize()
        return out


class _Eager:
    """A sequence's calls, from the model's thread."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._loop = asyncio.get_running_loop()

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        async def both() -> U16:
            await self._sequence.append(layer, keys, values)
            result = await self._sequence.attend(layer, queries)
            await result.done()
            return np.asarray(result.out, np.uint16)

        return asyncio.run_coroutine_threadsafe(both(), self._loop).result()
