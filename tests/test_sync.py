"""The blocking surface, and the mailbox it and the loop share."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsswap
from hsswap import HighSpeedSwap, ModelDims, Sequence, SwapConfig, TopK
from hsswap.config import PredictorConfig
from hsswap.errors import ArgumentError, ClosedError, ConfigError
from hsswap.io.memory import MemoryIO
from hsswap.loop import Mailbox
from hsswap.sync import BlockingSequence, BlockingSwap
from tests.test_odd_arguments import INNER, OPENING, public_calls

DIMS = ModelDims.uniform(layers=1, q_heads=2, kv_heads=1, head_dim=8)


def config() -> SwapConfig:
    return SwapConfig(DIMS, 64, 40, 40, tile_tokens=256, predictor=PredictorConfig())


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parent.parent,
    )


def test_public_names_are_there() -> None:
    for name in hsswap.__all__:
        assert getattr(hsswap, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hsswap.nothing


@pytest.mark.parametrize("name", ["bf16.from_float32", "rope.llama3_factors", "rounds.RoundStream"])
def test_modules_that_the_readme_names_need_no_import_of_their_own(name: str) -> None:
    done = run_python(f"import hsswap; print(hsswap.{name}.__module__)")
    assert done.stdout.startswith(f"hsswap.{name.partition('.')[0]}"), done.stderr


def test_append_and_attend_without_a_loop() -> None:
    keys = np.zeros((3, 1, 8), np.uint16)
    values = np.full((3, 1, 8), 0x3F80, np.uint16)  # 1.0
    with hsswap.blocking(config(), io=MemoryIO()) as swap:
        assert swap.config == config()
        with swap.sequence() as sequence:
            sequence.append(0, keys, values)
            result = sequence.attend(0, np.zeros((1, 2, 8), np.uint16))
            result.synchronize()
            assert (np.asarray(result.out) == 0x3F80).all()
            swap.flush()
            assert swap.statistics().attends == 1
        with pytest.raises(ClosedError):
            sequence.append(0, keys, values)
        with pytest.raises(hsswap.HsswapError):
            swap.sequence(top_k=TopK(400))


TRIED = {"try_append", "try_attend", "try_truncate"}
"""Plain calls that the blocking ones try first."""
FOR_THE_SWAP = {
    "quiet", "launched", "let_go", "free_slots", "adopt", "number", "ids", "top_k", "busy",
}  # fmt: skip
BY_RUN = {
    "offload_block", "offload_block_on_stream", "offload_block_no_predict_on_stream",
    "attend_layer", "attend_layer_on_stream", "attend_layer_on_stream_with_q_pos",
    "alloc_disk_block_id", "inc_disk_ref", "dec_disk_ref", "disk_refcount", "disk_free_count",
}  # fmt: skip
"""Blocks by id: whoever has tables of his own asks through :meth:`BlockingSwap.run`."""
NOT_FOR_ENGINES = {"store_statistics", "check_loop", "check_open", "named"}


def public(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def test_a_blocking_sequence_has_every_call_with_the_same_arguments() -> None:
    theirs = public(Sequence) - TRIED - FOR_THE_SWAP
    assert public(BlockingSequence) - {"awaitable"} == theirs
    for name in theirs:
        if callable(getattr(Sequence, name)):
            assert arguments(BlockingSequence, name) == arguments(Sequence, name), name


def arguments(owner: type, name: str) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults."""
    parameters = inspect.signature(getattr(owner, name)).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_a_blocking_swap_has_every_call_of_an_engine() -> None:
    theirs = public_calls(HighSpeedSwap) - INNER - OPENING - NOT_FOR_ENGINES
    assert public(BlockingSwap) - {"run", "config"} == theirs - BY_RUN
    assert theirs >= BY_RUN
    for name in theirs - BY_RUN:
        assert arguments(BlockingSwap, name) == arguments(HighSpeedSwap, name), name


def test_blocks_by_id_without_a_loop() -> None:
    keys = np.zeros((16, 1, 8), np.uint16)
    values = np.full((16, 1, 8), 0x3F80, np.uint16)  # 1.0
    out = np.zeros((2, 8), np.uint16)
    with hsswap.blocking(config(), io=MemoryIO()) as swap:
        block = swap.run(lambda s: s.alloc_disk_block_id())
        swap.run(
            lambda s: s.offload_block(layer=0, block=block, k_block_host=keys, v_block_host=values)
        )
        result = swap.run(
            lambda s: s.attend_layer(
                layer=0, seq_block_ids=[block], q_dev=np.zeros((2, 8), np.uint16), output_dev=out
            )
        )
        result.synchronize()
        assert (out == 0x3F80).all()
        assert swap.run(lambda s: s.dec_disk_ref(block=block)) == 0
        assert swap.diagnostic_summary().active_disk_blocks == 0


def ones(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, 1, 8), np.uint16), np.full((rows, 1, 8), 0x3F80, np.uint16)


@pytest.mark.parametrize("kept", [0, 1, 20])
def test_captured_steps_without_a_loop(kept: int) -> None:
    out = np.zeros((1, 2, 8), np.uint16)
    with hsswap.blocking(config(), io=MemoryIO()) as swap, swap.sequence() as sequence:
        sequence.append(0, *ones(7))
        with sequence.captured(20) as steps:
            with pytest.raises(ArgumentError, match="captured steps"):
                sequence.append(0, *ones(1))
            for _ in range(kept):
                steps.append(0, *ones(1))
                steps.attend(0, np.zeros((1, 2, 8), np.uint16), out)
                steps.advance(1)
            steps.finish(7 + kept)
        assert sequence.length == 7 + kept
        sequence.append(0, *ones(1))
        result = sequence.attend(0, np.zeros((1, 2, 8), np.uint16))
        result.synchronize()
        assert (np.asarray(result.out) == 0x3F80).all()
        assert not kept or (out == 0x3F80).all()
        with pytest.raises(ArgumentError), sequence.captured(-1):
            pass
        with pytest.raises(ZeroDivisionError), sequence.captured(4):
            _ = 1 / 0
        assert not sequence.closed
    assert sequence.closed


def test_a_swap_that_is_closed_under_captured_steps_of_a_thread() -> None:
    swap = hsswap.blocking(config(), io=MemoryIO())
    sequence = swap.sequence()
    sequence.append(0, *ones(7))
    with sequence.captured(20) as steps:
        swap.close()
        with pytest.raises(ClosedError):
            steps.advance(1)
    sequence.close()


def test_a_config_that_cannot_open_leaves_no_thread() -> None:
    before = threading.active_count()
    bad = SwapConfig(DIMS, 64, 40, 40, tile_tokens=256, io="tape")
    with pytest.raises(ConfigError, match="memory"), hsswap.blocking(bad):
        raise AssertionError("opened")
    assert threading.active_count() == before


def test_a_blocking_call_on_the_loop_is_refused() -> None:
    with hsswap.blocking(config(), io=MemoryIO()) as swap:
        caught: list[BaseException] = []
        done = threading.Event()

        def call() -> None:
            try:
                swap.flush()
            except ArgumentError as error:
                caught.append(error)
            done.set()

        swap._loop._loop.call_soon_threadsafe(call)
        done.wait()
        assert "never return" in str(caught[0])


def test_closing_on_the_loop_is_refused() -> None:
    before = threading.active_count()
    with hsswap.blocking(config(), io=MemoryIO()) as swap:

        async def close(_: HighSpeedSwap) -> None:
            swap.close()

        with pytest.raises(ArgumentError, match="never return"):
            swap.run(close)
        swap.flush()
    assert threading.active_count() == before


def test_a_swap_that_was_closed_by_hand_leaves_no_thread() -> None:
    before = threading.active_count()
    with hsswap.blocking(config(), io=MemoryIO()) as swap:
        swap.run(lambda inner: inner.close())
        with pytest.raises(ClosedError):
            swap.flush()
    assert threading.active_count() == before
    swap.close()


def test_what_is_no_sequence_and_nothing_to_be_awaited() -> None:
    with hsswap.blocking(config(), io=MemoryIO()) as swap:
        given: Any
        for given in ([None], 5, [swap]):
            with pytest.raises(ArgumentError, match="sequence"):
                swap.attend_batch(0, given, np.zeros((1, 1, 8), np.uint16), None)
        call: Any = lambda inner: inner.statistics()  # noqa: E731
        with pytest.raises(ArgumentError, match="awaited"):
            swap.run(call)


def test_interrupted_calls_leave_nothing_behind() -> None:
    """Ctrl-C while the loop works for a blocking caller: everything is closed on the way out."""
    code = """
import signal, sys, threading
from pathlib import Path
from typing import Any
import hsswap
from hsswap.io.memory import Fault, FaultKind, MemoryIO
import numpy as np
dims = hsswap.ModelDims.uniform(layers=1, q_heads=1, kv_heads=1, head_dim=8)
hold = Fault(FaultKind.HOLD, only="write")
config = hsswap.SwapConfig(dims, 64, 40, 40, tile_tokens=256)
def interrupt():
    hold.gate.reached.wait()
    signal.pthread_kill(main, signal.SIGINT)
    released.wait()
    hold.gate.opened.set()
main = threading.main_thread().ident
released = threading.Event()
helper = threading.Thread(target=interrupt)
helper.start()
try:
    with hsswap.blocking(config, io=MemoryIO([hold])) as swap, swap.sequence() as sequence:
        zeros = np.zeros((16, 1, 8), np.uint16)
        sequence.append(0, zeros, zeros)
        try:
            swap.flush()
        finally:
            released.set()
except KeyboardInterrupt:
    helper.join()
    print("threads", threading.active_count())
"""
    done = run_python(code)
    assert done.stdout == "threads 1\n", done.stderr


def test_a_forgotten_swap_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    """Left open by a script that ends: closed behind it, with a warning, and its files removed."""
    done = run_python(
        f"""
import hsswap, numpy as np
dims = hsswap.ModelDims.uniform(layers=1, q_heads=1, kv_heads=1, head_dim=8)
config = hsswap.SwapConfig(dims, 64, 40, 40, tile_tokens=256, directory={str(tmp_path / "d")!r})
swap = hsswap.blocking(config)
sequence = swap.sequence()
zeros = np.zeros((16, 1, 8), np.uint16)
sequence.append(0, zeros, zeros)
print("end")
"""
    )
    assert done.stdout == "end\n"
    assert done.returncode == 0
    assert "a swap was not closed" in done.stderr
    assert not (tmp_path / "d").exists()


def test_closing_by_hand_twice_and_in_any_order() -> None:
    swap = hsswap.blocking(config(), io=MemoryIO())
    sequence = swap.sequence()
    zeros = np.zeros((1, 1, 8), np.uint16)
    sequence.append(0, zeros, zeros)
    assert sequence.layer_length(0) == 1
    swap.close()
    sequence.close()
    swap.close()


async def test_blocking_works_where_a_loop_is_running() -> None:
    with hsswap.blocking(config(), io=MemoryIO()) as swap:
        assert swap.statistics().attends == 0


async def test_a_mailbox_runs_everything_in_order_with_few_wake_ups() -> None:
    loop = asyncio.get_running_loop()
    mailbox = Mailbox(loop)
    seen: list[int] = []
    done = asyncio.Event()

    def post_all() -> None:
        for number in range(1000):
            mailbox.post(lambda number=number: seen.append(number))  # type: ignore[misc]
        mailbox.post(done.set)

    await asyncio.to_thread(post_all)
    await done.wait()
    assert seen == list(range(1000))
    mailbox.post(lambda: mailbox.post(done.set))
    done.clear()
    await done.wait()
    mailbox.close()
    mailbox.post(lambda: seen.append(-1))
    await asyncio.sleep(0)
    assert seen[-1] == 999
