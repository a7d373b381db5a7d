"""The forward pass against a float64 one written apart, and the real SmolLM2 on real text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.bf16 import F32, U16, from_float32, to_float32
from hsswap.errors import ArgumentError
from hsswap.models import Llama, PlainAttention, Tokenizer, default_model_path, open_gguf
from tests.models.tiny_llama import Change, Tiny, tiny_weights, write_tiny

F64 = NDArray[np.float64]

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
# Relative L2 of logits. The model rounds q, k, v and attention's output to BF16; where float32 and
# float64 fall on two sides of a rounding's midpoint, one element differs by 2**-8 of itself.
TOLERANCE = 5e-3


class Call(NamedTuple):
    layer: int
    queries: U16
    keys: U16
    values: U16


@dataclass
class Recorder:
    """Attention that answers zeros and keeps what it was given."""

    calls: list[Call] = field(default_factory=list)

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        self.calls.append(Call(layer, queries.copy(), keys.copy(), values.copy()))
        return np.zeros_like(queries)


def round_bf16(x: F64) -> F64:
    """To 8 significant bits, ties to even."""
    mantissa, exponent = np.frexp(x)
    rounded: F64 = np.ldexp(np.rint(mantissa * 256.0), exponent - 8)
    return rounded


def rotate(x: F64, position: int, tiny: Tiny, factors: F64) -> F64:
    """One head ``[head_dim]`` turned by its position, pair by adjacent pair."""
    out = x.copy()
    for pair in range(tiny.rope_dims // 2):
        angle = position * tiny.rope_base ** (-2 * pair / tiny.rope_dims) / factors[pair]
        a, b = x[2 * pair], x[2 * pair + 1]
        out[2 * pair] = a * np.cos(angle) - b * np.sin(angle)
        out[2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
    return out


def reference_logits(tiny: Tiny, weights: dict[str, F32], tokens: list[int], factors: F64) -> F64:
    """Float64 logits ``[tokens, vocab]``, one token, one head, one layer at a time."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}

    def norm(x: F64, name: str) -> F64:
        normed: F64 = x / np.sqrt(np.mean(x**2) + tiny.rms_eps) * w[name]
        return normed

    cache: dict[tuple[int, int], list[tuple[F64, F64]]] = {}
    logits = []
    for position, token in enumerate(tokens):
        x = w["token_embd.weight"][token]
        for layer in range(tiny.layers):
            at = f"blk.{layer}."
            h = norm(x, at + "attn_norm.weight")
            q, k, v = (
                (w[f"{at}attn_{name}.weight"] @ h).reshape(-1, tiny.head_dim) for name in "qkv"
            )
            for head in range(tiny.kv_heads):
                turned = round_bf16(rotate(k[head], position, tiny, factors))
                cache.setdefault((layer, head), []).append((turned, round_bf16(v[head])))
            outs = []
            for head in range(tiny.q_heads):
                seen = cache[layer, head // (tiny.q_heads // tiny.kv_heads)]
                query = round_bf16(rotate(q[head], position, tiny, factors))
                scores = np.array([query @ key for key, _ in seen]) / np.sqrt(tiny.head_dim)
                share = np.exp(scores - scores.max())
                share /= share.sum()
                outs.append(round_bf16(share @ np.array([value for _, value in seen])))
            x = x + w[at + "attn_output.weight"] @ np.concatenate(outs)
            h = norm(x, at + "ffn_norm.weight")
            gate = w[at + "ffn_gate.weight"] @ h
            up = w[at + "ffn_up.weight"] @ h
            x = x + w[at + "ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        head_matrix = w.get("output.weight", w["token_embd.weight"])
        logits.append(head_matrix @ norm(x, "output_norm.weight"))
    return np.array(logits)


def model(tmp_path: Path, tiny: Tiny | None = None, change: Change | None = None) -> Llama:
    tiny = tiny or Tiny()
    path = write_tiny(tmp_path / "tiny.gguf", tiny, tiny_weights(tiny), change=change)
    return Llama.from_gguf(open_gguf(path))


def plain(llama: Llama) -> PlainAttention:
    c = llama.config
    return PlainAttention(c.layers, c.kv_heads, c.head_dim, capacity_tokens=4)


def distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("tied", [False, True])
def test_against_float64(tmp_path: Path, tied: bool) -> None:
    tiny = Tiny(tied=tied)
    llama = model(tmp_path, tiny)
    logits = llama.forward(TOKENS, 0, plain(llama), all_logits=True)
    assert logits.dtype == np.float32
    expected = reference_logits(tiny, tiny_weights(tiny), TOKENS, np.ones(4))
    assert distance(logits, expected) < TOLERANCE


def test_rope_factors_against_float64(tmp_path: Path) -> None:
    factors = np.array([1.0, 2.0, 5.0, 8.0])

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    tiny = Tiny()
    llama = model(tmp_path, tiny, add)
    logits = llama.forward(TOKENS, 0, plain(llama), all_logits=True)
    weights = tiny_weights(tiny)
    assert distance(logits, reference_logits(tiny, weights, TOKENS, factors)) < TOLERANCE
    assert llama.weights.rope_factors is not None
    assert (llama.weights.rope_factors == factors).all()
    # Sensitive enough: without the factors it is another model.
    assert distance(logits, reference_logits(tiny, weights, TOKENS, np.ones(4))) > 4 * TOLERANCE


def test_linear_rope_scaling_against_float64(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    tiny = Tiny()
    llama = model(tmp_path, tiny, add)
    logits = llama.forward(TOKENS, 0, plain(llama), all_logits=True)
    expected = reference_logits(tiny, tiny_weights(tiny), TOKENS, np.full(4, 4.0))
    assert distance(logits, expected) < TOLERANCE


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 29, 30, 1000])
def test_chunking_changes_nothing(tmp_path: Path, chunk_rows: int) -> None:
    llama = model(tmp_path)
    whole = llama.forward(TOKENS, 0, plain(llama))
    seen: list[tuple[int, int]] = []
    logits = llama.prefill(
        TOKENS, plain(llama), chunk_rows=chunk_rows, progress=lambda *done: seen.append(done)
    )
    assert logits.shape == (llama.config.vocab_size,)
    assert distance(logits, whole) < TOLERANCE
    assert seen[-1] == (30, 30)
    assert len(seen) == -(-30 // chunk_rows)


def test_greedy_steps_continue_the_prefill(tmp_path: Path) -> None:
    llama = model(tmp_path)
    attention = plain(llama)
    tokens = [*TOKENS, int(llama.prefill(TOKENS, attention).argmax())]
    for _ in range(5):
        tokens.append(llama.decode(tokens[-1], len(tokens) - 1, attention))
    again = plain(llama)
    logits = llama.forward(tokens, 0, again, all_logits=True)
    assert tokens[len(TOKENS) :] == logits.argmax(axis=1)[len(TOKENS) - 1 : -1].tolist()


def test_rope_turns_adjacent_pairs(tmp_path: Path) -> None:
    tiny, position = Tiny(), 700
    llama = model(tmp_path, tiny)
    recorder = Recorder()
    llama.forward([5], 0, recorder)
    llama.forward([5], position, recorder)
    at_zero, turned = recorder.calls[0], recorder.calls[tiny.layers]
    pairs = ((at_zero.queries, turned.queries), (at_zero.keys, turned.keys))
    for before, after in pairs:
        heads = to_float32(before)[0].astype(np.float64)
        expected = np.array([rotate(head, position, tiny, np.ones(4)) for head in heads])
        np.testing.assert_allclose(to_float32(after)[0], expected, atol=0.02)
        np.testing.assert_array_equal(before[..., 8:], after[..., 8:])
    np.testing.assert_array_equal(at_zero.values, turned.values)  # values are not turned


def test_rope_table_grows_to_the_same_numbers(tmp_path: Path) -> None:
    grown, fresh = model(tmp_path), model(tmp_path)
    recorders = Recorder(), Recorder()
    grown.forward([1], 0, Recorder())
    grown.forward(TOKENS, 1100, recorders[0])
    fresh.forward(TOKENS, 1100, recorders[1])
    for mine, theirs in zip(recorders[0].calls, recorders[1].calls, strict=True):
        np.testing.assert_array_equal(mine.queries, theirs.queries)


def test_model_keeps_nothing_of_a_sequence(tmp_path: Path) -> None:
    """With an attention that forgets, what was run before must not matter."""
    llama = model(tmp_path)
    first = llama.forward([7], 20, Recorder())
    llama.forward(TOKENS[:20], 0, Recorder())
    np.testing.assert_array_equal(llama.forward([7], 20, Recorder()), first)


def test_attend_gets_contiguous_codes_of_every_layer_in_order(tmp_path: Path) -> None:
    tiny, recorder = Tiny(), Recorder()
    model(tmp_path, tiny).prefill(TOKENS, recorder, chunk_rows=16)
    assert [call.layer for call in recorder.calls] == [0, 1, 0, 1]
    for (_, q, k, v), rows in zip(recorder.calls, [16, 16, 14, 14], strict=True):
        assert q.shape == (rows, tiny.q_heads, tiny.head_dim)
        assert k.shape == v.shape == (rows, tiny.kv_heads, tiny.head_dim)
        assert q.dtype == k.dtype == v.dtype == np.uint16
        assert q.flags.c_contiguous


@pytest.mark.parametrize(
    ("tokens", "position"),
    [
        ([], 0),
        ([1, 2], -1),
        ([1, 2], 1199),
        ([1], 1200),
        ([12], 0),
        ([-1], 0),
        ([1.5], 0),
        ([[1]], 0),
        ([True], 0),
    ],
)
def test_bad_tokens_reach_no_attention(tmp_path: Path, tokens: Any, position: int) -> None:
    llama, recorder = model(tmp_path), Recorder()
    with pytest.raises(ArgumentError):
        llama.forward(tokens, position, recorder)
    with pytest.raises(ArgumentError):
        llama.prefill(tokens, recorder, position=position, chunk_rows=1)
    with pytest.raises(ArgumentError, match="chunk_rows"):
        llama.prefill([1], recorder, chunk_rows=0)
    assert not recorder.calls


def test_last_position_of_the_context(tmp_path: Path) -> None:
    assert model(tmp_path).forward([1], 1199, Recorder()).shape == (12,)


def test_attention_of_the_wrong_shape(tmp_path: Path) -> None:
    class Wrong:
        def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
            return keys

    with pytest.raises(ArgumentError, match="attend returned uint16"):
        model(tmp_path).forward([1], 0, Wrong())


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(6, 2, 10), (4, 4, 8), (5, 1, 16)])
def test_plain_attention_against_float64(q_heads: int, kv_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(5)
    attention = PlainAttention(1, kv_heads, head_dim, capacity_tokens=2)
    keys: list[F64] = []
    values: list[F64] = []
    for rows in (1, 3, 1, 12, 1, 30):
        q, k, v = (
            from_float32(rng.standard_normal((rows, heads, head_dim)).astype(np.float32))
            for heads in (q_heads, kv_heads, kv_heads)
        )
        out = to_float32(attention.attend(0, q, k, v))
        for row in range(rows):
            keys.append(to_float32(k[row]).astype(np.float64))
            values.append(to_float32(v[row]).astype(np.float64))
            for head in range(q_heads):
                own = head // (q_heads // kv_heads)
                query = to_float32(q[row, head]).astype(np.float64)
                scores = np.array([key[own] @ query for key in keys]) / np.sqrt(head_dim)
                share = np.exp(scores) / np.exp(scores).sum()
                expected = share @ np.array([value[own] for value in values])
                assert distance(out[row, head], expected) < 2**-8
    assert attention.length(0) == 48


def test_plain_attention_refuses_what_does_not_fit() -> None:
    attention = PlainAttention(1, 2, 8)

    def codes(rows: int, heads: int, head_dim: int = 8) -> U16:
        return np.zeros((rows, heads, head_dim), np.uint16)

    for layer, q, k, v in [
        (1, codes(1, 4), codes(1, 2), codes(1, 2)),
        (0, codes(1, 3), codes(1, 2), codes(1, 2)),
        (0, codes(0, 4), codes(0, 2), codes(0, 2)),
        (0, codes(1, 4), codes(2, 2), codes(1, 2)),
        (0, codes(1, 4, 6), codes(1, 2), codes(1, 2)),
    ]:
        with pytest.raises(ArgumentError):
            attention.attend(layer, q, k, v)
    assert attention.length(0) == 0
    with pytest.raises(ArgumentError):
        PlainAttention(0, 2, 8)


def test_smollm2_predicts_real_text() -> None:
    """512 tokens of Python's documentation: 2.86 nats a token (2.48 over the first 2,048).

    The band is narrow enough to notice a wrong pairing in RoPE, digits not split one by one, or a
    mask that is off by one.
    """
    file = open_gguf(default_model_path())
    llama, tokenizer = Llama.from_gguf(file), Tokenizer.from_gguf(file)
    tokens = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[:4000])[:512]
    attention, c = PlainAttention(30, 3, 64), llama.config
    assert (c.layers, c.kv_heads, c.head_dim, c.tied_embeddings) == (30, 3, 64, True)
    logits = np.concatenate(
        [
            llama.forward(tokens[first : first + 256], first, attention, all_logits=True)
            for first in (0, 256)
        ]
    )[:-1]
    top = logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    nats = log_sum - logits[np.arange(len(logits)), tokens[1:]]
    assert 2.75 < nats.mean() < 2.97
