"""``hsswap generate``: right results, faults that --verify finds, and that nothing else keeps K."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.__main__ import main
from hsswap.config import ModelDims
from hsswap.decoding import Step, SwapAttention, count_agreeing, dims_of, must_read_blocks
from hsswap.driver.base import Buffer, Stream
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import AttendWork, GatherWork
from hsswap.errors import ConfigError
from hsswap.generate import run_job
from hsswap.interrupts import Interrupted, Interrupts
from hsswap.models import Llama, PlainAttention
from hsswap.planning import make_plan
from hsswap.plot import PlotError, draw
from hsswap.progress import Progress
from hsswap.sync import BlockingSequence, BlockingSwap, blocking
from tests.running import LEAST_HOST_SLOTS, LEAST_SLOTS, TinyRun

JSON_KEYS = (
    "text tokens tokens_agree max_rel_err tokens_per_s context_tokens kv_bytes slot_bytes "
    "bytes_read bytes_written hits misses read_wait_s read_overlap left_out_mass path"
).split()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun.make(tmp_path_factory.mktemp("tiny"))


# What comes out.


def test_the_tokens_are_those_of_the_plain_model(tiny: TinyRun, tmp_path: Path) -> None:
    report, failures = tiny.run("--tokens", "40", "--verify", "--dir", str(tmp_path / "store"))
    assert failures == []
    assert report.verified is not None
    assert report.verified.failures == 0
    assert 0 < report.verified.max_error <= report.verified.bound_at_max
    # Chunks of prefill and steps of decoding, in every layer.
    job = tiny.job()
    chunks = -(-len(job.prompt) // 256)
    assert report.verified.calls == 3 * (chunks + len(report.run.tokens) - 1)
    assert report.verified.rows == 3 * (report.run.context_tokens - 1)
    assert report.tokens_agree == len(report.run.tokens)
    model = Llama.from_gguf(job.file)
    plain = PlainAttention(3, 2, 16)
    token = int(model.prefill(job.prompt, plain).argmax())
    for position, ours in enumerate(report.run.tokens, len(job.prompt)):
        assert ours == token
        token = model.decode(token, position, plain)
    assert not (tmp_path / "store").exists()


def test_it_reads_what_exact_mode_must_read(tiny: TinyRun, tmp_path: Path) -> None:
    report, _ = tiny.run("--tokens", "20", "--dir", str(tmp_path))
    assert report.run.must_read_bytes > 0
    assert report.statistics.bytes_read >= report.run.must_read_bytes
    blocks = sum(step.resident + step.ahead + step.waited for step in report.run.steps)
    full = [(report.run.prompt_tokens + step + 1) // 16 for step in range(len(report.run.steps))]
    # The block being filled is attended too.
    assert 3 * sum(full) <= blocks <= 3 * sum(count + 1 for count in full)


def test_json_is_one_object_with_the_keys_of_the_design(
    tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--tokens", "9", "--json", "--verify", "--dir", str(tmp_path / "store"))
    assert main(tiny.arguments(*more)) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    assert list(found) == JSON_KEYS
    assert found["tokens"] == 9
    assert found["tokens_agree"] == 9
    assert 0 < found["max_rel_err"] < 0.01
    assert found["context_tokens"] == len(tiny.job().prompt) + 9
    assert found["kv_bytes"] == found["context_tokens"] * 3 * 2 * 2 * 16 * 2
    assert found["slot_bytes"] == LEAST_SLOTS * 2 * 16 * 32 * 2 + LEAST_HOST_SLOTS * 4096
    assert found["bytes_read"] > 0
    assert found["left_out_mass"] == 0.0
    assert "within promise 1" in printed.err


def test_without_verify_there_is_nothing_to_say_about_errors(
    tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny.arguments("--tokens", "1", "--json", "--dir", str(tmp_path))) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_agree"] is None
    assert found["max_rel_err"] is None
    assert found["tokens_per_s"] == 0.0


def test_text_is_printed_as_it_is_made(tiny: TinyRun) -> None:
    job = tiny.job("--tokens", "12", "--io", "memory")

    class Log(StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    written: list[str] = []
    with Interrupts() as interrupts:
        report, _ = run_job(
            job, Llama.from_gguf(job.file), interrupts, text_to=Log(), progress_to=StringIO()
        )
    pieces = [text for text in written if text]
    assert len(pieces) > 6
    assert "".join(pieces).rstrip("\n") == report.text.rstrip("\n")


def test_generation_ends_with_the_models_own_end(tiny: TinyRun) -> None:
    job = tiny.job("--tokens", "20", "--io", "memory")
    tokens = tiny.run("--tokens", "20", "--io", "memory")[0].run.tokens
    job.tokenizer.stop_ids = frozenset({tokens[7]})
    with Interrupts() as interrupts:
        model = Llama.from_gguf(job.file)
        report, _ = run_job(job, model, interrupts, progress_to=StringIO())
    assert report.run.tokens == tokens[: tokens.index(tokens[7]) + 1]


def test_top_k(tiny: TinyRun, tmp_path: Path) -> None:
    more = ("--mode", "topk", "--tokens", "20", "--verify", "--dir", str(tmp_path))
    report, failures = tiny.run(*more)
    assert failures == []
    assert report.verified is not None
    assert 0 < report.run.left_out_mean <= report.run.left_out_max < 1
    against_dense = report.verified.max_against_dense
    assert against_dense is not None
    assert against_dense > report.verified.max_error
    assert report.statistics.device_hits > 0
    assert report.statistics.bytes_read > 0


# Faults that --verify must find.


class Drop(HostDevice):
    """Attention without the block at logical position 5."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = work.slots.copy()
        if work.first_block == 0:
            slots[:, :, 5:6] = -1
        super().attend(stream, replace(work, slots=slots))


class DropLate(HostDevice):
    """The same, in one attend late in the run."""

    calls = 0

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = work.slots.copy()
        if work.first_block == 0:
            self.calls += 1
            if self.calls == 40:
                slots[:, :, 5:6] = -1
        super().attend(stream, replace(work, slots=slots))


class ExchangeHeads(HostDevice):
    """Two units of one block exchanged: each KV head attends to the other's."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = work.slots.copy()
        if work.first_block == 0:
            slots[:, :, 5] = slots[:, ::-1, 5]
        super().attend(stream, replace(work, slots=slots))


class ExchangeLast(HostDevice):
    """The last block and the first exchanged, so that the fill of the last cuts the other."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = work.slots.copy()
        slots[:, :, [0, -1]] = slots[:, :, [-1, 0]]
        super().attend(stream, replace(work, slots=slots))


class Shift(HostDevice):
    """One token fewer is seen than there is."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        super().attend(stream, replace(work, lengths=work.lengths - 1))


class ShiftBeyond(HostDevice):
    """One token more is seen than was written."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        super().attend(stream, replace(work, lengths=work.lengths + 1))


class Stale(HostDevice):
    """A gather that leaves one unit as it was: what an earlier tile or layer had there."""

    def gather(self, stream: Stream, work: GatherWork) -> None:
        kept = slice(1, None) if len(work.heads) > 1 else slice(None)
        super().gather(
            stream,
            replace(
                work,
                host_slots=work.host_slots[kept],
                heads=work.heads[kept],
                device_slots=work.device_slots[kept],
            ),
        )


class OtherBlock(HostDevice):
    """A gather that serves one block in place of another: two entries name one host slot."""

    def gather(self, stream: Stream, work: GatherWork) -> None:
        host_slots = work.host_slots.copy()
        if len(host_slots) > 1:
            host_slots[0] = host_slots[1]
        super().gather(stream, replace(work, host_slots=host_slots))


FAULTS = [Drop, DropLate, ExchangeHeads, ExchangeLast, Shift, ShiftBeyond, Stale, OtherBlock]


@pytest.fixture(scope="module")
def sound(tiny: TinyRun) -> list[int]:
    """Tokens of a run without a fault, which passes."""
    report, failures = tiny.run("--tokens", "12", "--verify", "--io", "memory", device=HostDevice())
    assert failures == []
    return report.run.tokens


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds(fault: Callable[[], HostDevice], tiny: TinyRun, sound: list[int]) -> None:
    report, failures = tiny.run("--tokens", "12", "--verify", "--io", "memory", device=fault())
    assert report.verified is not None
    assert report.verified.failures > 0
    assert "at most" in str(failures[0])
    if fault is DropLate:
        # What the tokens alone do not show.
        assert report.verified.failures == 1
        assert report.run.tokens == sound


def test_a_result_beyond_the_promise_is_exit_1(
    tiny: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsswap.swap.open_device", lambda name: Drop())
    assert main(tiny.arguments("--tokens", "3", "--verify", "--json", "--io", "memory")) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["max_rel_err"] > 0.01
    last = printed.err.splitlines()[-1]
    assert last.startswith("hsswap: layer ")
    assert "more calls failed" in last
    assert "BEYOND promise 1" in printed.err


# No other KV cache.


def zero_the_cache(swap: BlockingSwap, sequence: BlockingSequence) -> None:
    """Overwrite every byte of K and V that the swap has: device slots, host slots, disk."""
    inner, number = swap._swap, sequence._sequence.number

    async def write(layer: int, indices: NDArray[np.int64], zeros: Buffer) -> None:
        done = asyncio.get_running_loop().create_future()
        left = len(indices)

        def on_done(positions: NDArray[np.int64], error: Exception | None) -> None:
            nonlocal left
            assert error is None
            left -= len(positions)
            if left == 0:
                done.set_result(None)

        addresses = np.full(left, zeros.address, np.uint64)
        inner._store.write(layer, indices, addresses, on_done=on_done)
        await done

    async def stop_reading_ahead() -> None:
        inner.prefetcher.plan(number, [])
        await inner.prefetcher.settle()

    swap.flush()
    swap._loop.run(stop_reading_ahead())
    for pool in inner._pools:
        pool.units.memory.array()[...] = 0
        pool.blocks.memory.array()[...] = 0
    with inner.device.allocate_host(1 << 16) as zeros:
        for layer in range(inner.config.dims.layers):
            full = sequence._sequence.layer_length(layer) // 16
            assert full > 30
            swap._loop.run(write(layer, sequence._sequence._indices[:full], zeros))


class Zeroed(SwapAttention):
    """Keys and values replaced by zeros before they get to the swap, as long as ``on``."""

    on = True

    def attend(
        self,
        layer: int,
        queries: NDArray[np.uint16],
        keys: NDArray[np.uint16],
        values: NDArray[np.uint16],
    ) -> NDArray[np.uint16]:
        if self.on:
            keys, values = np.zeros_like(keys), np.zeros_like(values)
        return super().attend(layer, queries, keys, values)


def test_no_other_kv_cache_is_kept(tiny: TinyRun, tmp_path: Path) -> None:
    job = tiny.job("--dir", str(tmp_path / "store"))
    model = Llama.from_gguf(job.file)
    logits = []
    for erase in (True, False):
        with blocking(job.plan.config) as swap, swap.sequence() as sequence:
            attention = Zeroed(sequence)
            attention.on = not erase
            before = model.prefill(job.prompt, attention)
            attention.on = False
            if erase:
                intact = before
                zero_the_cache(swap, sequence)
            logits.append(model.forward([3], len(job.prompt), attention))
    # Everything that the next token sees of the prompt came out of the slots and the store ...
    assert (logits[0] == logits[1]).all()
    # ... and it would have been another answer.
    with blocking(job.plan.config) as swap, swap.sequence() as sequence:
        attention = SwapAttention(sequence)
        assert (model.prefill(job.prompt, attention) == intact).all()
        assert (model.forward([3], len(job.prompt), attention) != logits[0]).any()


def array_bytes(root: object) -> int:
    """Bytes of all NumPy arrays that can be reached from an object, modules and types left out."""
    seen: set[int] = set()
    todo, total = [root], 0
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, type | type(sys)):
            continue
        seen.add(id(found))
        if isinstance(found, np.ndarray):
            total += found.nbytes
        todo += [o for o in gc.get_referents(found) if not callable(o) or hasattr(o, "attend")]
    return total


def test_nothing_in_the_model_grows_with_the_tokens(tiny: TinyRun) -> None:
    job = tiny.job("--io", "memory")
    model = Llama.from_gguf(job.file)
    sizes = []
    with blocking(job.plan.config) as swap, swap.sequence() as sequence:
        attention = SwapAttention(sequence)
        model.prefill(job.prompt[:20], attention)
        sizes.append(array_bytes(model))
        model.prefill(job.prompt[20:], attention, position=20)
        sizes.append(array_bytes(model))
        assert array_bytes(attention.left_out) == 0
    assert sizes[0] == sizes[1] > 10_000


# Interrupts inside the process: threads and descriptors are counted by the leak check.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", ["progress", "text"])
def test_a_signal_leaves_nothing(
    tiny: TinyRun, tmp_path: Path, where: str, number: signal.Signals, code: int
) -> None:
    class Raising(StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(number)
            return len(text)

    store = tmp_path / "store"
    job = tiny.job("--tokens", "50", "--verify", "--dir", str(store))
    streams = {"progress_to": StringIO(), "text_to": StringIO(), f"{where}_to": Raising()}
    model = Llama.from_gguf(job.file)
    with Interrupts() as interrupts, pytest.raises(Interrupted) as caught:
        run_job(job, model, interrupts, **streams)  # type: ignore[arg-type]
    assert caught.value.exit_code == code
    assert not store.exists()
    tiny.run("--tokens", "2", "--dir", str(store))


def test_signals_are_kept_while_held_and_raised_at_once_elsewhere() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted), interrupts.held():
            signal.raise_signal(signal.SIGINT)
            reached = True
            interrupts.check()
            reached = False
        assert reached
        signal.raise_signal(signal.SIGINT)  # everything is being closed already
    with Interrupts(), pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a second one does not wait
        raise AssertionError("not reached")
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.held():
        signal.raise_signal(signal.SIGINT)  # and the end of the block is a check


# Plans, steps, pictures.


def test_the_default_plan_is_an_eighth_of_the_cache(tiny: TinyRun) -> None:
    dims = ModelDims.uniform(layers=30, q_heads=9, kv_heads=3, head_dim=64)
    options = replace(tiny.job().options, slots=None, host_slots=None)
    plan = make_plan(options, dims, 2240)
    assert plan.config.device_slots + plan.config.host_slots == 30 * 140 // 8 - 1
    assert plan.top_k is None
    # A short context: the least that can work.
    small = make_plan(options, dims, 100).config
    assert (small.device_slots, small.host_slots) == (62, 32)
    top_k = make_plan(replace(options, mode="topk"), dims, 2240)
    assert top_k.top_k is not None
    assert top_k.top_k.k == 4
    assert make_plan(replace(options, mode="topk"), dims, 8192).top_k == replace(top_k.top_k, k=15)


@pytest.mark.parametrize("slots", [392, 451, 452, 2000])
def test_in_top_k_mode_k_is_what_fits(tiny: TinyRun, slots: int) -> None:
    dims = ModelDims.uniform(layers=30, q_heads=9, kv_heads=3, head_dim=64)
    options = replace(tiny.job().options, mode="topk", slots=slots, host_slots=None)
    plan = make_plan(options, dims, 2240)
    assert plan.top_k is not None
    assert plan.top_k.k == {392: 1, 451: 1, 452: 2, 2000: 27}[slots]
    needed = plan.config.min_device_slots + 30 * plan.top_k.cache_blocks(16)
    assert needed <= slots == plan.config.device_slots
    with pytest.raises(ConfigError, match="392"):
        make_plan(replace(options, slots=391), dims, 2240)


def test_must_read(tiny: TinyRun) -> None:
    config = tiny.job().plan.config
    slots = config.device_slots + config.host_slots
    assert must_read_blocks(config, 0) == 0
    assert must_read_blocks(config, slots // 3 * 16 + 15) == 0
    assert must_read_blocks(config, 1600) == 300 - slots
    assert dims_of(Llama.from_gguf(tiny.job().file).config) == config.dims


def test_the_plain_model_agrees_with_itself(tiny: TinyRun) -> None:
    job = tiny.job()
    model = Llama.from_gguf(job.file)
    plain = PlainAttention(3, 2, 16)
    tokens = [int(model.prefill(job.prompt, plain).argmax())]
    for position in range(len(job.prompt), len(job.prompt) + 5):
        tokens.append(model.decode(tokens[-1], position, plain))
    assert count_agreeing(model, job.prompt, tokens) == 6
    tokens[-1] = (tokens[-1] + 1) % 12
    assert count_agreeing(model, job.prompt, tokens) == 5
    assert count_agreeing(model, job.prompt, tokens[:1]) == 1


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let matplotlib open its fonts, which it keeps open."""
    draw(tmp_path_factory.mktemp("fonts") / "first.png", [Step(0.1, 1, 1, 1)], "first")


def test_the_picture(
    fonts: None, tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "run.png"
    more = ("--tokens", "5", "--plot", str(picture), "--dir", str(tmp_path / "store"))
    assert main(tiny.arguments(*more)) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(tmp_path.iterdir()) == [picture]
    assert f"picture: {picture}" in capsys.readouterr().err


def test_the_picture_of_one_token(fonts: None, tmp_path: Path) -> None:
    draw(tmp_path / "none.png", [], "no steps")
    draw(tmp_path / "one.png", [Step(0.1, 3, 2, 1)], "one")
    with pytest.raises(PlotError, match="name another file"):
        draw(tmp_path / "missing" / "x.png", [], "nowhere")
    assert len(list(tmp_path.iterdir())) == 2


def test_progress_on_a_terminal_and_elsewhere() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    progress = Progress(terminal)
    progress.update(50, 100)
    progress.update(100, 100)
    assert terminal.getvalue().count("\r") == 2
    assert terminal.getvalue().endswith("] 100/100 tokens\n")
    progress = Progress(terminal)
    progress.update(1, 100)
    progress.close()
    assert terminal.getvalue().endswith("1/100 tokens\n")
    file = StringIO()
    progress = Progress(file)
    for done in range(1, 101):
        progress.update(done, 100)
    lines = file.getvalue().splitlines()
    assert lines[0] == "prefill 1/100 tokens"
    assert lines[-1] == "prefill 100/100 tokens"
    assert len(lines) <= 11
