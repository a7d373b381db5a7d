"""A sequence's steps by calls that may wait for a disk: captured steps, one round at a time.

Used from a thread that is not the loop's. The interface is that of
:class:`~hsswap.captured.CapturedSteps`, so that a model cannot tell the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import hsswap.sequence
from hsswap.arguments import leading
from hsswap.driver.base import Device, Stream
from hsswap.driver.round_operations import CopyWork, SetWork
from hsswap.driver.tensor import Tensor

T = TypeVar("T")


class Steps(Protocol):
    """What a model needs of a sequence in a round; see :class:`~hsswap.captured.CapturedSteps`."""

    @property
    def length(self) -> Tensor:
        """Tokens of every layer before the step: i32 ``[1]``, in memory of the device."""
        ...

    def append(self, layer: int, keys: Any, values: Any, *, stream: object | None = None) -> None:
        """Add rows behind :attr:`length`."""
        ...

    def attend(
        self,
        layer: int,
        queries: Any,
        out: Any,
        *,
        exact: bool = False,
        stream: object | None = None,
    ) -> None:
        """Attention of the rows just appended."""
        ...

    def advance(self, rows: int, *, stream: object | None = None) -> None:
        """Count ``rows`` more tokens."""
        ...


class WaitingSteps:
    """:class:`Steps` of one sequence between :meth:`begin` and its next call.

    ``length`` is written by launches only; where the rows go follows from the sequence itself. Rows
    from position ``end`` on are left out.
    """

    def __init__(
        self,
        device: Device,
        sequence: hsswap.sequence.Sequence,
        length: Tensor,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._kernels = device.round_kernels()
        self._sequence, self._length, self._loop = sequence, length, loop
        self._position = self._end = self._rows = 0

    @property
    def length(self) -> Tensor:
        """See :class:`Steps`."""
        return self._length

    def begin(self, position: int, end: int) -> None:
        """A round at ``position``, whose rows end before ``end``. Enqueues nothing."""
        self._position, self._end = position, end

    def rewind(self, stream: Stream) -> None:
        """Back to the position, in every layer; waits."""
        if self._sequence.length > self._position:
            self._wait(self._sequence.truncate(self._position, stream=stream))
        self.set_length(stream)

    def set_length(self, stream: Stream) -> None:
        """:attr:`length` to the position."""
        whole = Tensor(self._length.address, (1, 1), (4, 4), "i32", self._length.on_device, self)
        self._kernels.set_word(stream, SetWork(whole, 0, self._position))

    def append(self, layer: int, keys: Any, values: Any, *, stream: object | None = None) -> None:
        """See :class:`Steps`; waits for host slots."""
        room = self._end - self._sequence.layer_length(layer)
        self._rows = min(leading(keys, "keys"), room)
        if self._rows < 1:
            return
        keys, values = _first(keys, self._rows), _first(values, self._rows)
        if not self._sequence.try_append(layer, keys, values, stream=stream):
            self._wait(self._sequence.append(layer, keys, values, stream=stream))

    def attend(
        self,
        layer: int,
        queries: Any,
        out: Any,
        *,
        exact: bool = False,
        stream: object | None = None,
    ) -> None:
        """See :class:`Steps`; waits for blocks that are only on disk."""
        if self._rows < 1:
            return
        arrays = _first(queries, self._rows), _first(out, self._rows)
        options: dict[str, Any] = {"exact": exact or None, "stream": stream}
        if self._sequence.try_attend(layer, *arrays, **options) is None:
            self._wait(self._sequence.attend(layer, *arrays, **options))

    def advance(self, rows: int, *, stream: object | None = None) -> None:
        """See :class:`Steps`."""
        assert isinstance(stream, Stream)
        self._kernels.copy_add(stream, CopyWork(self._length, self._length, rows))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _first(array: Any, rows: int) -> Any:
    """The first rows of an array of any kind."""
    return array.rows(0, rows) if isinstance(array, Tensor) else array[:rows]
