"""Self-tests of ``hsswap doctor``: attention that must be exact, bytes that must come back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.bf16 import U16, from_float32
from hsswap.commands.doctor_probes import MISSING, OK, Check
from hsswap.commands.verify import AttentionVerifier
from hsswap.config import SPAN_TOKENS, ModelDims, SwapConfig
from hsswap.driver.host import HostDevice
from hsswap.errors import HsswapError
from hsswap.io.store import BlockStore
from hsswap.sync import blocking

KINDS = tuple(
    ModelDims.uniform(layers=1, q_heads=6, kv_heads=2, head_dim=64, kv_dtype=kv_dtype)
    for kv_dtype in ("bf16", "e4m3")
)
DIMS = KINDS[0]
TOKENS = 700  # two spans and a part of a third, the last block ragged
NEIGHBOURS = 5
STORE_BLOCKS = 32


def attention() -> Iterator[Check]:
    """Promise 1 on this machine's BLAS: within the bound, and no row depends on its neighbours."""
    random = np.random.default_rng(1)

    def draw(*shape: int) -> U16:
        return from_float32(random.standard_normal(shape, np.float32))

    keys, values = draw(TOKENS, 2, 64), draw(TOKENS, 2, 64)
    queries = draw(TOKENS, 6, 64)
    texts = []
    for dims in KINDS:
        config = SwapConfig(
            dims, TOKENS, device_slots=128, host_slots=128, io="memory", tile_tokens=SPAN_TOKENS
        )
        verifier = AttentionVerifier(dims)
        with blocking(config) as swap, swap.sequence() as sequence:
            sequence.append(0, keys, values)
            results = []
            for rows in (TOKENS, NEIGHBOURS, 1):
                out = np.empty((rows, 6, 64), np.uint16)
                sequence.attend(0, queries[-rows:], out).synchronize()
                results.append(out)
        verifier.record(0, queries, keys, values, results[0])
        errors = verifier.check()[0]
        kind = dims.groups[0].kv_dtype
        if not errors.ok:
            yield _broken("attention", f"{kind}: {errors.failure()}")
            return
        if any((out[-1] != results[0][-1]).any() for out in results):
            yield _broken("attention", f"{kind}: a row's result depends on those beside it (BLAS)")
            return
        texts.append(f"{kind} error {errors.ours:.1e} of at most {errors.bound:.1e}")
    text = f"{', '.join(texts)}; rows are independent (host device)"
    yield Check("attention", OK, text, required=True)


def store(directory: Path) -> Iterator[Check]:
    """Blocks written to a new folder and read back, checked by the store and again byte by byte.

    ``directory`` is where the folder is made.
    """
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix="hsswap-doctor-") as folder:
            path = asyncio.run(_round_trip(Path(folder)))
    except (HsswapError, OSError) as error:
        yield _broken("store", str(error), "name another folder with --dir")
        return
    nbytes = STORE_BLOCKS * DIMS.block_bytes(DIMS.groups[0])
    text = f"{STORE_BLOCKS} blocks, {nbytes >> 10} KiB, written and read back by {path}"
    yield Check("store", OK, text, required=True)


async def _round_trip(directory: Path) -> str:
    """The way the bytes took. Raises HsswapError when one came back different, or not at all."""
    block_bytes = DIMS.block_bytes(DIMS.groups[0])
    nbytes = STORE_BLOCKS * block_bytes
    device = HostDevice()
    try:
        async with await BlockStore.open(DIMS, directory, STORE_BLOCKS) as blocks:
            ids = blocks.ids.allocate(STORE_BLOCKS)
            indices = blocks.ids.check(ids)
            with device.allocate_host(nbytes) as written, device.allocate_host(nbytes) as read:
                content = _bytes_of(written.address, nbytes)
                content[...] = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8)
                steps = np.arange(STORE_BLOCKS, dtype=np.uint64) * np.uint64(block_bytes)
                for operation, buffer in ((blocks.write, written), (blocks.read, read)):
                    done = _Done(STORE_BLOCKS)
                    addresses = steps + np.uint64(buffer.address)
                    operation(0, indices, addresses, owner=buffer, on_done=done)
                    await done.finished
                same = bool((_bytes_of(read.address, nbytes) == content).all())
                del content  # a view of memory that is about to go
            if not same:
                raise HsswapError("bytes came back different, and the checksums did not notice")
            return blocks.path
    finally:
        device.close()


class _Done:
    """Counts finished blocks; ``finished`` has the first error, if there was one."""

    def __init__(self, count: int) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = count
        self._error: HsswapError | None = None

    def __call__(self, positions: NDArray[np.int64], error: HsswapError | None) -> None:
        self._left -= len(positions)
        self._error = self._error or error
        if self._left == 0 and not self.finished.done():
            if self._error is not None:
                self.finished.set_exception(self._error)
            else:
                self.finished.set_result(None)


def _bytes_of(address: int, nbytes: int) -> NDArray[np.uint8]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _broken(name: str, meaning: str, fix: str = "report it with this output") -> Check:
    return Check(name, MISSING, meaning, fix, required=True)
