"""Greedy decode steps of the torch model over captured steps of a sequence: one CUDA graph a token.

Token, position and length live on the device. A launch takes 10 us and waits for nothing; tokens
are read back when somebody wants them. On the CPU the same steps run one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hsswap.models.torch_llama import TorchLlama

if TYPE_CHECKING:
    from hsswap.captured import CapturedSteps


class StepAttention:
    """:class:`~hsswap.models.torch_llama.TorchAttention` over captured steps: rows are appended
    behind the steps' length and attended, and not counted.

    ``stream``: the steps' own where tensors are on the CPU, which must be waited for there; None on
    a GPU, where torch's current stream is it. ``exact`` as in
    :meth:`hsswap.captured.CapturedSteps.attend`. For verifying K + 1 rows give them all at once; a
    drafter of the first layers gives one row at a time and advances in between.
    """

    def __init__(
        self,
        model: TorchLlama,
        steps: CapturedSteps,
        *,
        stream: Any = None,
        exact: bool = False,
    ) -> None:
        self._arrays = model.arrays
        self._steps = steps
        self._stream = stream
        self._exact = exact

    @property
    def stream(self) -> object:
        """What the steps' calls get as ``stream``."""
        return self._arrays.stream if self._stream is None else self._stream

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`~hsswap.models.torch_llama.TorchAttention`."""
        arrays, steps, stream = self._arrays, self._steps, self.stream
        steps.append(layer, arrays.for_swap(keys), arrays.for_swap(values), stream=stream)
        out = arrays.new((*queries.shape[:2], values.shape[2]))
        taken, filled = arrays.for_swap(queries), arrays.for_swap(out)
        steps.attend(layer, taken, filled, exact=self._exact, stream=stream)
        if self._stream is not None:
            self._stream.synchronize()
        return out


class DecodeSteps:
    """A model's greedy loop on the device: ``token`` at the steps' length, then the next, ...

    Use :meth:`launch` on the stream that is torch's current one when this is made, and the steps'
    own. The first launch runs eagerly, which loads what a capture may not, the second captures.
    """

    def __init__(
        self,
        model: TorchLlama,
        steps: CapturedSteps,
        token: int,
        *,
        stream: Any = None,
        exact: bool = False,
    ) -> None:
        room = steps.most_length - steps.first_length
        self._model = model
        self._steps = steps
        self._attention = StepAttention(model, steps, stream=stream, exact=exact)
        self._length = on_device(steps.length, model.device)
        self._token = torch.tensor([token], device=model.device)
        self._tokens = torch.full((room,), -1, device=model.device)
        self._first = steps.first_length
        self._stream = stream
        self._graph: Any = None
        self.launched = 0

    def launch(self) -> None:
        """Enqueue one step. At most as many as the steps have room for tokens."""
        if self._graph is not None:
            self._graph.replay()
        elif self.launched == 0 or self._model.arrays.stream is None:
            self._enqueue()
        else:
            self._graph = captured(self._enqueue)
            self._graph.replay()
        self.launched += 1

    def tokens(self) -> list[int]:
        """What the launched steps chose; waits for them."""
        chosen: list[int] = self._tokens[: self.launched].tolist()
        return chosen

    def _enqueue(self) -> None:
        hidden = self._model.hidden(self._token, self._length, self._attention)
        self._model.choose(hidden, self._token)
        self._tokens.index_copy_(0, (self._length - self._first).long(), self._token)
        self._steps.advance(1, stream=self._attention.stream)
        if self._stream is not None:
            self._stream.synchronize()


def captured(enqueue: Any, *, keep: bool = False) -> Any:
    """A CUDA graph of what ``enqueue()`` puts on torch's current stream; nothing runs.

    ``keep``: its raw graph stays, to be a part of another one.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    # thread_local: the swap's own threads go on asking events meanwhile.
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        enqueue()
    return graph


class _Raw:
    """Device memory of the swap as torch takes it."""

    def __init__(self, tensor: Any) -> None:
        self._owner = tensor
        kinds = {"i32": "<i4", "i64": "<i8", "f32": "<f4", "u8": "|u1"}
        self.__cuda_array_interface__ = {
            "data": (tensor.address, False),
            "shape": tensor.shape,
            "strides": tensor.strides,
            "typestr": kinds[tensor.dtype],
            "version": 3,
        }


def on_device(tensor: Any, device: str) -> torch.Tensor:
    """The same memory as a torch tensor."""
    if tensor.on_device:
        return torch.as_tensor(_Raw(tensor), device=device)
    return torch.from_numpy(tensor.array())
