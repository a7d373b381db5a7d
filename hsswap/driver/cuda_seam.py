"""What the launch code of an operation may ask of a CUDA device.

``cuda.CudaDevice`` keeps this contract; ``cuda_operations`` and ``cuda_attention`` are written
against it. An operation's launch code gets a *checked* record whose index arrays are copies and
whose tensors the device can all reach (device memory, or mapped host memory under one address):
it uploads the index arrays, packs one parameter struct and launches. It never waits, never
allocates, and never touches the current context: the device has made its own current.

A kernel is ``extern "C" __global__ void NAME(const __grid_constant__ Params p)``: one struct by
value, at most 4,000 bytes, packed by :mod:`struct` with explicit padding. Sources are in
``hsswap/ptx``; the table in ``hsswap/ptx/__init__.py`` says which file and entry a kernel is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.driver.base import Stream


class Grid(NamedTuple):
    """Blocks of a grid, or threads of a block, in x, y, z."""

    x: int
    y: int = 1
    z: int = 1


def format_constants(dtype: str) -> dict[str, int | str]:
    """The -D constants of kernels that take BF16, for a 16-bit format."""
    return {"FP16": 1} if dtype == "f16" else {}


def unit_constants(group: LayerGroup) -> dict[str, int | str]:
    """The same of kernels that read K or V in units."""
    return format_constants(group.dtype) | ({"E4M3": 1} if group.is_e4m3 else {})


def key_scales_at(group: LayerGroup, block_size: int) -> int:
    """The byte of a unit of E4M3 at which the scales of K begin; those of V are behind them."""
    return block_size * (group.head_dim + group.value_dim)


class Launch(NamedTuple):
    """What :meth:`Launcher.launch` was asked for."""

    kernel: str
    constants: Mapping[str, int | str]
    grid: Grid
    block: Grid
    shared_bytes: int
    params: bytes
    cluster: int = 1
    follows: bool = False


class Chip(Protocol):
    """What the choice of kernels depends on, of a GPU."""

    compute_capability: tuple[int, int]
    sm_count: int
    shared_bytes_limit: int
    """Bytes of dynamic shared memory that a thread block may ask for (227 KiB on sm_90)."""


class Launcher(Chip, Protocol):
    """The part of ``CudaDevice`` that launch code uses."""

    arch: str
    """``"sm_90a"``: what the kernels are compiled for."""

    def launch(
        self,
        stream: Stream,
        kernel: str,
        constants: Mapping[str, int | str],
        grid: Grid,
        block: Grid,
        shared_bytes: int,
        params: bytes,
        *,
        cluster: int = 1,
        follows: bool = False,
    ) -> None:
        """Launch a kernel of the table on ``stream``.

        ``constants`` become -D options; each set of them is a module of its own, compiled at its
        first use (some 0.3 s; 1 ms from the cache on disk) and kept: ``cuda_prepare`` lists what a
        swap launches, so that it is there before. A grid with no block is no launch. ``cluster``:
        thread blocks of a cluster, in x. ``follows``: the kernel may begin before the one ahead of
        it has ended, and waits for it itself (griddepcontrol.wait, sm_90 and newer). Raises
        DeviceError.
        """
        what = kernel, constants, grid, block, shared_bytes, params
        self.start(stream, Launch(*what, cluster=cluster, follows=follows))

    def start(self, stream: Stream, launch: Launch) -> None:
        """Do what :meth:`launch` was asked to."""

    def last_launch(self, stream: Stream) -> Launch | None:
        """What was launched last on ``stream`` by :meth:`launch`, None if that is not known."""
        state = getattr(stream, "state", None)
        return None if state is None else cast("Launch | None", state.last_launch)

    def upload(self, stream: Stream, array: NDArray[Any], *, direct: bool = False) -> int:
        """Make an index array readable for the kernels that this stream launches next.

        Returns its address, aligned to 16 bytes, valid until the operation's kernels have run.
        Never waits: the bytes go through a pinned ring, whose places are used again only after the
        event behind their last reader. ``direct``: kernels read the ring itself over the link
        (best for short lists that are read once); else a copy in device memory is made.
        """

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Copy bytes of mapped host memory to the device by the copy engine, in stream order."""

    def keep(self, stream: Stream, name: str, array: NDArray[Any]) -> int:
        """As :meth:`upload`, for an array that rarely changes: the last one under ``name`` stays in
        device memory, and is copied again only when the bytes differ. Returns its address, aligned
        to 256 bytes, valid until ``name`` is kept again.
        """

    def workspace(self, stream: Stream, nbytes: int) -> int:
        """Address of device memory of this stream, aligned to 256 bytes, kept between launches.

        Zero when first given out; it may move when a larger one is asked for, and is zero again
        then. Kernels must leave zero what they expect to be zero (counters). All operations of a
        stream share it, one after the other: only what every user leaves zero may be relied on, so
        keep counters in the first 64 KiB and leave them zero; nothing else there survives.
        """

    def max_active_clusters(self, launch: Launch) -> int:
        """How many clusters of such launches run at a time (cuOccupancyMaxActiveClusters),
        remembered. Neither grid nor parameters count.
        """
