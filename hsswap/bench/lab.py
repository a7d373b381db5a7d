"""What the benches of the swap itself share: a device's arrays and clock, and slices in turn.

On a GPU arrays are torch tensors and work goes to a torch stream; on the host they are NumPy arrays
and nothing but hsswap is needed, so that the benches' own code is tested without a GPU.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsswap import HighSpeedSwap, Sequence
from hsswap.bench.figures import SLICES_MIN, Interval
from hsswap.bf16 import from_float32
from hsswap.commands.output import say
from hsswap.driver.base import AttendAgain, Device, Stream
from hsswap.driver.cuda_errors import load_driver
from hsswap.driver.operations import AttendWork, GatherWork
from hsswap.errors import DeviceError
from hsswap.models import Arrays, HostArrays

FILL_ROWS = 4096
"""Rows of K and V appended at a time."""


def need_gpu(device: str, otherwise: str) -> None:
    """Raise DeviceError where there is no driver for a GPU; ``otherwise``: what to do then."""
    try:
        load_driver(device)
    except DeviceError as error:
        reason = str(error).partition(', or use device="host"')[0]
        raise DeviceError(f"{reason}; {otherwise}") from error


class Lab:
    """A device by name, with arrays to suit: ``with Lab.on("cuda:0") as lab``."""

    def __init__(self, device: str, arrays: Arrays, stream: Any) -> None:
        self.device = device
        self.arrays = arrays
        self.torch_stream = stream
        self._random = np.random.default_rng(7)

    @classmethod
    @contextmanager
    def on(cls, device: str) -> Iterator[Lab]:
        """Raises DeviceError for a GPU without a driver, or where torch is missing or sees none."""
        if device == "host":
            yield cls(device, HostArrays(), None)
            return
        need_gpu(device, "--device host --quick runs without one")
        try:
            import torch

            from hsswap.models.torch_llama import TorchArrays
        except ImportError as error:
            raise DeviceError(
                f"a bench on {device} needs torch: pip install 'hsswap[bench,torch]', or give "
                "--device host --quick"
            ) from error
        if not torch.cuda.is_available():
            raise DeviceError(f"torch sees no GPU for {device}; give --device host --quick")
        stream = torch.cuda.Stream(device)
        torch.manual_seed(7)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield cls(device, TorchArrays(device), stream)

    @property
    def on_gpu(self) -> bool:
        """Whether arrays are torch tensors."""
        return self.torch_stream is not None

    @property
    def stream(self) -> int | None:
        """What calls of the swap get as ``stream``."""
        return self.arrays.stream

    def normal(self, shape: tuple[int, ...], scale: float = 1.0) -> Any:
        """Normal numbers, BF16, as the swap takes them."""
        if self.on_gpu:
            return self.arrays.for_swap(self.arrays.new(shape).normal_(0.0, scale))
        values = self._random.standard_normal(shape) * scale
        return from_float32(values.astype(np.float32))

    def between_layers(self, width: int, ffn_width: int, layers: int) -> Callable[[int], None]:
        """Work of the size of a layer's matrices for one row: ``work(layer)`` enqueues it."""
        rows = 2 * width + 3 * ffn_width  # about q, k, v, o and the three of the MLP
        if self.on_gpu:
            weights = self.arrays.new((layers, rows, width)).normal_(0.0, 0.01)
            row = self.arrays.new((1, width)).normal_()

            def enqueue(layer: int) -> None:
                row @ weights[layer].T

            return enqueue
        matrix = self._random.standard_normal((rows, width), np.float32)

        def compute(layer: int) -> None:
            del layer
            matrix @ matrix[0]

        return compute

    async def ended(self, result: Any) -> None:
        """Until an attend and all before it has run."""
        await result.done()

    async def seconds(self, work: Callable[[], Awaitable[Any]]) -> float:
        """Wall time of ``work``, which returns when what it enqueued has run."""
        await asyncio.to_thread(self.synchronize)
        start = time.perf_counter()
        await work()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the torch stream."""
        if self.on_gpu:
            self.torch_stream.synchronize()


async def fill(lab: Lab, swap: HighSpeedSwap, sequence: Sequence, tokens: int) -> None:
    """Random K and V in every layer, all of it written to the store and clean."""
    dims = swap.config.dims
    for layer in range(dims.layers):
        group = dims.group(layer)
        for start in range(0, tokens, FILL_ROWS):
            rows = min(FILL_ROWS, tokens - start)
            keys = lab.normal((rows, group.kv_heads, group.head_dim))
            values = lab.normal((rows, group.kv_heads, group.value_dim))
            await sequence.append(layer, keys, values, stream=lab.stream)
    await swap.flush()


class Muted:
    """A device some of whose operations do nothing: what is left is the time of the others.

    Stands in for a swap's device: ``with muted(swap, "attend")``. ``last`` has what was asked of
    each operation last.
    """

    def __init__(self, device: Device, names: tuple[str, ...]) -> None:
        self._device = device
        self._names = names
        self.last: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return lambda stream, work: None
        return getattr(self._device, name)

    def attend(self, stream: Stream, work: AttendWork) -> None:
        """See Device."""
        self._do("attend", stream, work)

    def attend_again(self, stream: Stream, work: AttendWork) -> AttendAgain | None:
        """None: a call made again would not come by here."""
        return None

    def gather(self, stream: Stream, work: GatherWork) -> None:
        """See Device."""
        self._do("gather", stream, work)

    def _do(self, name: str, stream: Stream, work: Any) -> None:
        self.last[name] = work
        if name not in self._names:
            getattr(self._device, name)(stream, work)


@contextmanager
def muted(swap: HighSpeedSwap, *names: str) -> Iterator[Muted]:
    """The swap's device without some operations, for the time of the block."""
    device = swap.device
    quiet = Muted(device, names)
    # What they would make again goes to the device.
    caches = [cache for sequence in swap._sequences.values() for cache in sequence._layers]
    kept = [cache.repeated for cache in caches]
    for cache in caches:
        cache.repeated = None
    swap.device = quiet  # type: ignore[assignment]
    try:
        yield quiet
    finally:
        swap.device = device
        for cache, repeated in zip(caches, kept, strict=True):
            cache.repeated = repeated


@dataclass(frozen=True, slots=True)
class Turns:
    """Times of the arms, one of each a turn: a ratio is taken inside a turn."""

    seconds: dict[str, list[float]]

    @classmethod
    async def of(cls, arms: Mapping[str, Callable[[], Awaitable[float]]], *, quick: bool) -> Turns:
        """Each arm once to warm up, then in turns of alternating order."""
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for arm in arms.values():
            await arm()
        for turn in range(3 if quick else SLICES_MIN + 1):
            order = list(arms) if turn % 2 else list(arms)[::-1]
            for name in order:
                seconds[name].append(await arms[name]())
        return cls(seconds)

    def median_us(self, name: str) -> Interval:
        """Of one arm, in microseconds."""
        return Interval.of([1e6 * value for value in self.seconds[name]])

    def of_turns(self, value: Callable[..., float]) -> Interval:
        """``value(arm=seconds, ...)`` of each turn."""
        names = list(self.seconds)
        turns = zip(*self.seconds.values(), strict=True)
        return Interval.of([value(**dict(zip(names, turn, strict=True))) for turn in turns])


def tell(text: str) -> None:
    """A line for people."""
    say(text, sys.stderr)
