"""``hsswap generate``: right results, faults that --verify finds, and that nothing else keeps K."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from hsswap.__main__ import main
from hsswap.commands.decoding import count_agreeing, dims_of, must_read_blocks
from hsswap.commands.generate import load_model, run_job
from hsswap.commands.interrupts import Interrupted, Interrupts
from hsswap.commands.planning import best_tile, check_memory, make_plan
from hsswap.config import ModelDims, PredictorConfig
from hsswap.errors import ArgumentError, ConfigError, DeviceError
from hsswap.fitting import LESSON_SPAN
from hsswap.models import Llama, PlainAttention
from tests.running import LEAST_HOST_SLOTS, LEAST_SLOTS, Terminal, TinyRun

JSON_KEYS = [
    "text",
    "tokens",
    "tokens_agree",
    "max_rel_err",
    "tokens_per_s",
    "context_tokens",
    "kv_bytes",
    "slot_bytes",
    "bytes_read",
    "bytes_written",
    "hits",
    "misses",
    "read_wait_s",
    "read_overlap",
    "left_out_mass",
    "path",
    "kv_dtype",
    "kv_rounding",
    "mode",
    "k",
    "model",
    "prefill_s",
    "prefix_tokens",
    "verified_calls",
    "speculate",
    "acceptance",
    "tokens_per_round",
]


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


@pytest.mark.parametrize("mode", ["exact", "topk"])
def test_a_cache_of_e4m3_is_verified_over_what_is_kept(
    tiny: TinyRun, tmp_path: Path, mode: str
) -> None:
    more = ("--tokens", "20", "--mode", mode, "--verify", "--dir", str(tmp_path / "store"))
    report, failures = tiny.run("--kv-dtype", "e4m3", *more)
    plain, _ = tiny.run(*more)
    assert failures == []
    assert report.verified is not None
    assert report.verified.failures == 0
    assert 0.02 < report.verified.rounding < 0.03
    assert "kept as e4m3" in report.as_table()
    assert report.as_json()["kv_dtype"] == "e4m3"
    # 16 dims and a scale of 4 bytes, or 16 dims of two bytes.
    assert report.kv_bytes / plain.kv_bytes == 20 / 32
    assert report.as_json()["kv_rounding"] == report.verified.rounding
    assert plain.as_json()["kv_rounding"] == 0.0


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
    assert (found["mode"], found["k"], found["model"]) == ("exact", None, "tiny")
    assert found["prefill_s"] > 0
    assert found["verified_calls"] == 3 * (-(-len(tiny.job().prompt) // 256) + 8)
    assert 0 <= found["read_overlap"] <= 1
    assert f"{found['max_rel_err']:.2e} of float64's, " in printed.err
    assert " allowed (1.5 times a usual kernel's)\n" in printed.err


def test_without_verify_there_is_nothing_to_say_about_errors(
    tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny.arguments("--tokens", "1", "--json", "--dir", str(tmp_path))) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_agree"] is None
    assert found["max_rel_err"] is None
    assert found["tokens_per_s"] == 0.0
    assert found["verified_calls"] is None


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


# Interrupts inside the process: threads and descriptors are counted by the leak check.


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
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


@pytest.mark.parametrize("stream_type", [Terminal, StringIO])
def test_the_prompt_of_the_shell_does_not_stand_behind_the_text(
    tiny: TinyRun, stream_type: type[StringIO]
) -> None:
    class Raising(stream_type):  # type: ignore[valid-type, misc]
        def write(self, text: str) -> int:
            if text.strip():
                signal.raise_signal(signal.SIGINT)
            super().write(text)
            return len(text)

    text_to, progress_to = Raising(), StringIO()
    job = tiny.job("--tokens", "50", "--io", "memory")
    model = Llama.from_gguf(job.file)
    with Interrupts() as interrupts, pytest.raises(Interrupted):
        run_job(job, model, interrupts, text_to=text_to, progress_to=progress_to)
    assert text_to.getvalue()
    assert text_to.getvalue().endswith("\n") == (stream_type is Terminal)
    assert progress_to.getvalue().endswith("\n--- continuation ---\n")


# Plans and steps.


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


@pytest.mark.parametrize(
    ("slots", "host_slots", "tile_tokens"),
    [(256, 256, 1024), (255, 256, 512), (256, 127, 256), (157, 1000, 512), (62, 32, 256)],
)
def test_tiles_leave_half_of_the_slots(slots: int, host_slots: int, tile_tokens: int) -> None:
    dims = ModelDims.uniform(layers=30, q_heads=9, kv_heads=3, head_dim=64)
    assert best_tile(dims, slots, host_slots) == tile_tokens


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


def test_slots_are_compared_with_memory(tiny: TinyRun) -> None:
    config = tiny.job().plan.config
    nbytes = LEAST_SLOTS * 2 * 16 * 32 * 2 + LEAST_HOST_SLOTS * 4096
    check_memory(config, LEAST_SLOTS, LEAST_HOST_SLOTS, nbytes)
    with pytest.raises(
        ConfigError, match=f"--slots is {LEAST_SLOTS}, .* at most {LEAST_SLOTS - 1} f"
    ):
        check_memory(config, LEAST_SLOTS, LEAST_HOST_SLOTS, nbytes - 1)
    most = LEAST_HOST_SLOTS - 1
    with pytest.raises(
        ConfigError, match=f"--host-slots is {LEAST_HOST_SLOTS}.* at most {most} fit"
    ):
        check_memory(config, LEAST_SLOTS, LEAST_HOST_SLOTS, LEAST_HOST_SLOTS * 4096 - 1)
    # Slots of a GPU are not in this memory.
    on_gpu = replace(config, device="cuda:0", device_slots=200, host_slots=200)
    check_memory(on_gpu, 1 << 40, LEAST_HOST_SLOTS, nbytes)


@pytest.mark.parametrize("mode", ["exact", "topk"])
def test_tiles_are_spans_of_the_device(tiny: TinyRun, mode: str) -> None:
    words = ("--mode", mode, "--slots", "400", "--host-slots", "130")
    assert tiny.job(*words).plan.config.tile_tokens < 1024
    assert tiny.job(*words, "--device", "cuda:0").plan.config.tile_tokens == 1024
    with pytest.raises(ConfigError, match="two tiles of 1024"):
        tiny.job("--mode", mode, "--slots", "100", "--device", "cuda:0")


def test_must_read(tiny: TinyRun) -> None:
    config = tiny.job().plan.config
    slots = config.device_slots + config.host_slots
    assert must_read_blocks(config, 0) == 0
    assert must_read_blocks(config, slots // 3 * 16 + 15) == 0
    assert must_read_blocks(config, 1600) == 300 - slots
    model = Llama.from_gguf(tiny.job().file).config
    assert dims_of(model) == config.dims
    rope = dims_of(model, rope_factors=np.full(model.rope_dims // 2, 2, np.float32)).groups[0].rope
    assert rope is not None
    assert rope.frequency_factors == (2 * model.rope_factor,) * (model.rope_dims // 2)


def test_a_gpu_needs_torch(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    with pytest.raises(DeviceError, match=r"pip install 'hsswap\[torch\]', or give --device host"):
        load_model(tiny.job().file, "cuda:0")


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


# What stays.


@pytest.mark.parametrize("mode", ["exact", "topk"])
def test_a_second_run_begins_with_what_the_first_stored(
    tiny: TinyRun, tmp_path: Path, mode: str
) -> None:
    prompt = len(tiny.job().prompt)
    fresh, _ = tiny.run("--tokens", "20", "--mode", mode)
    kept = ("--persist", "--dir", str(tmp_path / "store"), "--mode", mode)
    first, _ = tiny.run("--tokens", "20", *kept)
    second, _ = tiny.run("--tokens", "20", *kept)
    assert first.run.prefix_tokens == 0
    left = 1 if mode == "exact" else LESSON_SPAN  # those that top-k learns from
    assert second.run.prefix_tokens == (prompt - left) // 16 * 16
    assert second.as_json()["prefix_tokens"] == second.run.prefix_tokens
    assert "tokens were stored" in second.as_table()
    if mode == "topk":  # it learns from the last long chunk of a prompt, and that is another here
        third, _ = tiny.run("--tokens", "20", *kept)
        assert second.run.tokens == third.run.tokens
    else:  # a longer context spreads the samples of the predictor's basis further
        assert fresh.run.tokens == first.run.tokens == second.run.tokens
    assert second.statistics.bytes_written < first.statistics.bytes_written / 5
    third, _ = tiny.run("--tokens", "30", *kept)
    assert third.run.tokens[:20] == second.run.tokens


def test_what_stays_needs_a_place_and_is_not_verified(tiny: TinyRun, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--dir"):
        tiny.job("--persist")
    with pytest.raises(ArgumentError, match="--verify"):
        tiny.job("--persist", "--verify", "--dir", str(tmp_path))
    with pytest.raises(ArgumentError, match="--io memory keeps nothing"):
        tiny.job("--persist", "--io", "memory", "--dir", str(tmp_path))


@pytest.mark.parametrize("name", ["--draft", "--rounds"])
def test_drafts_without_speculation_are_refused(tiny: TinyRun, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} goes with --speculate"):
        tiny.job(name, "4")
    assert tiny.job("--speculate", "ngram").options.draft == 4


@pytest.mark.parametrize("share", [16, 32, 64])
def test_codes_take_what_is_said_of_them(tiny: TinyRun, share: int) -> None:
    words = ["--codes", str(share)] if share != 32 else []
    predictor = tiny.job("--mode", "topk", *words).plan.config.predictor
    assert predictor == PredictorConfig(metadata_ratio=1 / share)
    with pytest.raises(ArgumentError, match="--codes goes with --mode topk"):
        tiny.job("--codes", str(share))
