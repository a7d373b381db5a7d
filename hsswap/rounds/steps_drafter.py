"""Early exit over captured steps: a draft chain that the device runs without the host."""

from __future__ import annotations

from hsswap.driver.base import Closeable, Device, Stream
from hsswap.driver.round_operations import ArgmaxWork, CopyWork, PackWork
from hsswap.driver.tensor import tensor_in
from hsswap.errors import ArgumentError
from hsswap.rounds.buffers import StreamBufs
from hsswap.rounds.contracts import Drafter
from hsswap.rounds.steps_target import RowsModel, StepsTarget


class StepsEarlyExit(Drafter, Closeable):
    """Drafts with the first ``layers`` layers of the target's own model, and its head.

    Each draft's K and V go behind the sequence's tokens in these layers, where the verify writes
    the same ones again; lengths are put back before it. (Draft & Verify, J. Zhang et al.,
    2309.08168.) Close it behind the round stream.
    """

    def __init__(
        self, device: Device, target: StepsTarget, model: RowsModel, *, layers: int
    ) -> None:
        if layers < 1:
            raise ArgumentError(f"an early exit behind {layers} layers; 1 or more")
        self._kernels = device.round_kernels()
        self._target, self._model, self._layers = target, model, layers
        batch, vocab = target.logits.shape[0], target.vocab_size
        self._buffer = device.allocate(4 * batch * (vocab + 2))
        self._logits = tensor_in(self._buffer, "f32", (batch, 1, vocab))
        at = 4 * batch * vocab
        self._token = tensor_in(self._buffer, "u32", (batch,), offset_bytes=at)
        self._probability = tensor_in(self._buffer, "f32", (batch,), offset_bytes=at + 4 * batch)
        self._row = tensor_in(self._buffer, "u32", (batch, 1), offset_bytes=at)
        self._choose = ArgmaxWork(
            self._logits,
            self._row,
            tensor_in(self._buffer, "f32", (batch, 1), offset_bytes=at + 4 * batch),
        )

    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Drafter`."""
        kernels, opened = self._kernels, self._target.steps
        kernels.copy_add(stream, CopyWork(bufs.pend, self._token))
        for slot in range(bufs.k):
            self._model(stream, opened, self._row, self._logits, layers=self._layers)
            for steps in opened:
                steps.advance(1, stream=stream)
            kernels.argmax(stream, self._choose)
            kernels.pack_tok_p(stream, PackWork(self._token, self._probability, bufs.drafts, slot))
        for s, steps in enumerate(opened):
            kernels.copy_add(stream, CopyWork(bufs.pos_ctr.rows(s, s + 1), steps.length))

    def close(self) -> None:
        """Free the memory. Twice is fine."""
        self._buffer.close()
