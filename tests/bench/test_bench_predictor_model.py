"""Traces, our own predictor as a selector, and sparse attention end to end, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hsswap.bench.predictor_certificate import certified_share
from hsswap.bench.predictor_lessons import taught
from hsswap.bench.predictor_ours import Codes, Projection, samples_of
from hsswap.bench.predictor_rows import mask_of, view_of
from hsswap.bench.predictor_selectors import Oracle, ResidentOnly
from hsswap.bench.predictor_sparse import SparseAttention, compare_logits, run_sparse
from hsswap.bench.predictor_traces import BASIS_TOKENS, Trace
from hsswap.bench.predictor_view import BLOCK, LayerView, best_groups
from hsswap.bf16 import F32, U16, from_float32, to_float32
from hsswap.codec import HeadCodec, encode, log_mass, logits_of, shares
from hsswap.fitting import LESSON_SPAN, LESSON_STEP, fitted, sums_of
from hsswap.models import Llama, PlainAttention
from hsswap.predictor.calibration import stand_ins
from hsswap.predictor.stand_in import with_stand_in
from tests.bench.predictor_rig import SIZES, distance, tiny_model, tiny_trace
from tests.driver import oracle

START = SIZES.length - SIZES.window


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trace(model: Llama, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return tiny_trace(model, tmp_path_factory.mktemp("traces"))


class Watched(PlainAttention):
    """Keeps what passes."""

    def __init__(self, model: Llama) -> None:
        c = model.config
        super().__init__(c.layers, c.kv_heads, c.head_dim)
        self.seen: list[list[tuple[U16, U16, U16]]] = [[] for _ in range(c.layers)]

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        self.seen[layer].append((queries, keys, values))
        return super().attend(layer, queries, keys, values)


def test_a_trace_is_what_passed_through_attention(model: Llama, trace: Trace) -> None:
    watched = Watched(model)
    tokens = trace.context.tokens
    model.prefill(tokens[:START], watched)
    logits = model.forward(tokens[START : SIZES.length], START, watched, all_logits=True)
    assert distance(trace.logits(), logits) < 1e-5
    for layer, seen in enumerate(watched.seen):
        queries, keys, values = (np.concatenate(part) for part in zip(*seen, strict=True))
        for found, wanted in (
            (trace.keys(layer), keys),
            (trace.values(layer), values),
            (trace.basis_queries(layer), queries[:BASIS_TOKENS]),
            (trace.queries(layer), queries[START:]),
        ):
            assert found.shape == wanted.shape
            assert distance(to_float32(found), to_float32(wanted)) < 1e-5


def test_a_trace_is_read_again(model: Llama, trace: Trace, tmp_path: Path) -> None:
    first = tiny_trace(model, tmp_path, seed=9)
    before = [path.stat().st_mtime_ns for path in tmp_path.iterdir()]
    second = tiny_trace(model, tmp_path, seed=9)
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == before
    assert (first.keys(1) == second.keys(1)).all()
    assert first.name != trace.name


def test_queries_of_a_layer_early(model: Llama, trace: Trace) -> None:
    hidden: dict[int, F32] = {}
    watched = Watched(model)
    inputs = trace.context.tokens[:40]
    model.forward(inputs, 0, watched, on_layer=lambda layer, x: hidden.update({layer: x.copy()}))
    for layer in range(2):  # of a layer's own input they are its queries
        own = model.layer_queries(layer, hidden[layer], 0)
        assert distance(to_float32(own), to_float32(watched.seen[layer][0][0])) < 1e-6
    assert trace.early_queries(1).any()
    assert distance(to_float32(trace.early_queries(1)), to_float32(trace.queries(1))) > 1e-3


def test_codes_are_those_of_the_package(trace: Trace) -> None:
    selector = Codes(1 / 16, remembers=False)
    selector.learn(trace)
    view = view_of(trace, 1, trace.queries(1))
    scores = selector.scores(view, 4)
    able = view.candidates()
    for head, codec in enumerate(selector.codecs[1]):
        packed = encode(codec, view.key_blocks[head])
        for row in (0, 11):
            logits = logits_of(codec, view.queries[head, :, row], packed)
            mass = log_mass(logits)
            mass[:, ~able[row]] = -np.inf
            wanted = shares(mass, view.resident_lse[head, :, row])
            assert np.abs(scores[head, row] - wanted).max() < 1e-5
    planes = [codec.planes for layer in selector.codecs.values() for codec in layer]
    assert selector.metadata_bytes == 2 * BLOCK * np.mean(planes)
    assert np.mean(planes) * 2 <= (1 / 16) * 2 * 2 * 16 or min(planes) == max(planes) == 1


def test_memory_makes_attended_blocks_exact_in_the_end(trace: Trace) -> None:
    """With one query again and again the error of what was attended is soon corrected."""
    selector = Codes(1 / 32)
    selector.learn(trace)
    query = np.repeat(trace.queries(1)[-1:], 12, axis=0)
    view = LayerView.of(1, query, trace.keys(1), SIZES.length - 12)
    everything = view.candidates().shape[1]
    first, last = (selector.scores(view, everything)[:, row] for row in (0, 11))
    true = view.mass()[:, 11]
    able = view.candidates()[11]
    before = np.abs(first - true)[:, able].mean()
    assert np.abs(last - true)[:, able].mean() < 0.5 * before


def test_a_stand_in_is_that_of_the_package_for_what_is_left_out(trace: Trace) -> None:
    selector = Codes(1 / 16, stand_in="first tokens")
    selector.learn(trace)
    view = view_of(trace, 1, trace.queries(1))
    scores = selector.scores(view, 3)
    chosen = mask_of(best_groups(scores, view.candidates(), 3), scores.shape[-1])
    out = np.random.default_rng(1).standard_normal((2, 3, SIZES.tested, 16)).astype(np.float32)
    got = selector.made_up(view, chosen, out)
    of_head = stand_ins(samples_of(trace))[2:]
    for head, row in ((0, 0), (1, SIZES.tested - 1)):
        packed = encode(selector.codecs[1][head], view.key_blocks[head])
        mass = log_mass(logits_of(selector.codecs[1][head], view.queries[head, :, row], packed))
        rest = view.candidates()[row] & ~chosen[head, row]
        left = np.exp(mass[:, rest].astype(np.float64)).sum(1)
        ends = np.exp(view.total_lse[head, :, row].astype(np.float64))
        held = ends * (1 - view.query_mass()[head, :, row][:, rest].sum(1))
        wanted = with_stand_in(out[head, :, row], left / (left + held), of_head[head])
        np.testing.assert_allclose(got[head, :, row], wanted, rtol=1e-3, atol=1e-4)
    assert np.abs(got - out).max() > 1e-3
    assert (Codes(1 / 16, stand_in="none").made_up(view, chosen, out) == out).all()


def test_a_prompts_last_rows_teach_by_their_own_choice(trace: Trace) -> None:
    """Against loops over single rows; the choice of the oracle is that of float64 masses."""
    stop, layer, k = SIZES.length - SIZES.tested, 1, 3
    found = taught(trace, layer, stop, Oracle().scores, k)
    keys, values = (
        to_float32(part(layer)).astype(np.float64) for part in (trace.keys, trace.values)
    )
    queries = to_float32(trace.lesson_queries(layer, stop)).astype(np.float64)
    cut = ((stop + 1) // 16 - 8) * 16
    for head in range(2):
        sums = np.zeros(())
        for row in range(0, LESSON_SPAN, LESSON_STEP):
            seen = stop - LESSON_SPAN + row + 1
            logits = queries[row, 3 * head : 3 * head + 3] @ keys[:seen, head].T / 4
            weight = np.exp(logits - logits.max(1, keepdims=True))
            weight /= weight.sum(1, keepdims=True)
            mass = {b: weight[:, 16 * b : 16 * b + 16].sum() for b in range(1, cut // 16)}
            best = sorted(mass, key=lambda b: -mass[b])[:k]
            blocks = [0, *best, *range(cut // 16, seen // 16 + 1)]
            kept = [t for b in blocks for t in range(16 * b, min(16 * b + 16, seen))]
            full, held = weight @ values[:seen, head], weight[:, kept].sum(1)
            near = weight[:, kept] @ values[kept, head] / held[:, None]
            sums = sums + sums_of(near[None], oracle.round_to_bf16(full)[None], 1 - held[None])
        scale, value = fitted(np.asarray(sums))
        np.testing.assert_allclose(found[head].scale, scale, rtol=2e-2, atol=2e-3)
        np.testing.assert_allclose(found[head].value, value, rtol=2e-2, atol=2e-3)
        assert np.abs(value).max() > 0.05


def test_what_is_certified_holds(trace: Trace) -> None:
    selector = Codes(1 / 16)
    selector.learn(trace)
    view = view_of(trace, 1, trace.queries(1))
    chosen = np.zeros((2, SIZES.tested, view.key_blocks.shape[1]), np.bool_)
    true = np.where(view.candidates(), view.mass(), 0).sum(-1)
    seen = to_float32(trace.basis_queries(1)).reshape(-1, 2, 3, 16)
    for codecs in (selector.codecs[1], [exact_codec(view.keys[head]) for head in range(2)]):
        most = certified_share(view, codecs, seen, chosen)
        assert (most >= true - 1e-5).all()
    assert np.abs(most - true).max() < 0.2  # a step of a 64th of the range


def exact_codec(keys: F32) -> HeadCodec:
    """Six bits of every dim, as it is."""
    low, high = keys.min(0), keys.max(0)
    step = (high - low) / 64 * 1.001
    return HeadCodec(
        encode=np.diag(1 / step).astype(np.float32),
        bias=(-low / step).astype(np.float32),
        query=(np.diag(step) / 4).astype(np.float32),
        centre=((low + step / 2) / 4).astype(np.float32),
        bits=np.full(len(step), 6, np.uint8),
    )


def test_other_text_and_no_queries_make_other_codes(
    model: Llama, trace: Trace, tmp_path: Path
) -> None:
    other = tiny_trace(model, tmp_path, seed=5)
    view = view_of(trace, 0, trace.queries(0))
    found = []
    for selector in (Codes(1 / 16), Codes(1 / 16, other=other), Codes(1 / 16, queries=False)):
        selector.learn(trace)
        found.append(selector.scores(view, 4))
    assert (found[0] != found[1]).any()
    assert (found[0] != found[2]).any()


def test_projection_is_the_largest_product(trace: Trace) -> None:
    selector = Projection(9)
    selector.learn(trace)
    view = view_of(trace, 0, trace.queries(0))
    scores = selector.scores(view, 4)
    matrix = selector.matrix
    codes = to_float32(from_float32(view.keys[1] @ matrix))
    products = view.queries[1, :, 3] @ matrix @ codes[:16].T
    assert scores[1, 3, 0] == pytest.approx(products.max(), rel=1e-5)


def test_everything_chosen_is_dense(model: Llama, trace: Trace) -> None:
    dense = run_sparse(model, trace, ResidentOnly(), 0, SIZES.tested)
    assert dense.kl > 1e-4
    full = run_sparse(model, trace, Oracle(), SIZES.length // BLOCK, SIZES.tested)
    assert abs(full.kl) < 1e-4 < dense.kl
    logits = trace.logits()[-SIZES.tested :]
    assert full.nats == pytest.approx(compare_logits(trace, logits).nats, rel=1e-3)
    assert compare_logits(trace, logits).kl == pytest.approx(0, abs=1e-6)


def test_digits_are_counted_where_the_greatest_logit_is_right(trace: Trace) -> None:
    logits = np.zeros_like(trace.logits())
    rows = np.arange(SIZES.window)
    targets = np.array(trace.context.tokens[START + 1 : SIZES.length + 1])
    logits[rows, targets] = 5
    assert compare_logits(trace, logits)[3:] == (2, 2)
    logits[-1] = np.roll(logits[-1], 1)  # the last target is one of the digits
    assert compare_logits(trace, logits)[3:] == (1, 2)


class StepByStep:
    """The reference: one row a call, loops, float64, its own K and V of the rows before."""

    def __init__(self, trace: Trace, k: int, first: int) -> None:
        self._k = k
        self._keys = [trace.keys(layer)[:first] for layer in trace.ranked]
        self._values = [trace.values(layer)[:first] for layer in trace.ranked]

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        self._keys[layer] = np.concatenate([self._keys[layer], keys])
        self._values[layer] = np.concatenate([self._values[layer], values])
        k = to_float32(self._keys[layer]).astype(np.float64)
        v = to_float32(self._values[layer]).astype(np.float64)
        length, heads = len(k), k.shape[1]
        group = queries.shape[1] // heads
        out = np.empty(queries.shape, np.float32)
        for head in range(heads):
            q = to_float32(queries[0, head * group : (head + 1) * group]).astype(np.float64)
            logits = q @ k[:, head].T / np.sqrt(k.shape[2])
            weights = np.exp(logits - logits.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            cut = (length // BLOCK - 8) * BLOCK
            mass = weights.mean(0)[BLOCK:cut].reshape(-1, BLOCK).sum(1)
            best = 1 + np.argsort(-mass, kind="stable")[: self._k]
            token = np.arange(length)
            kept = (token < BLOCK) | (token >= cut) | np.isin(token // BLOCK, best)
            weights *= kept
            weights /= weights.sum(1, keepdims=True)
            out[0, head * group : (head + 1) * group] = weights @ v[:, head]
        return from_float32(out)


def test_all_rows_together_are_one_step_after_the_other(model: Llama, trace: Trace) -> None:
    first = SIZES.length - SIZES.tested
    tokens = trace.context.tokens
    reference = StepByStep(trace, 3, first)
    steps = [model.forward(tokens[at : at + 1], at, reference) for at in range(first, SIZES.length)]
    attention = SparseAttention(trace, Oracle(), 3, first)
    together = model.forward(tokens[first : SIZES.length], first, attention, all_logits=True)
    assert distance(together, np.stack(steps)) < 0.01
    dense = trace.logits()[-SIZES.tested :]
    assert distance(dense, np.stack(steps)) > 0.02  # sparse attention shows


def test_groups_of_four_read_as_many_tokens(model: Llama, trace: Trace) -> None:
    class Small(ResidentOnly):
        group_tokens = 4

        def scores(self, view: LayerView, k: int) -> F32:
            assert k == 8  # two blocks of 16
            return np.zeros((2, SIZES.tested, view.keys.shape[1] // 4), np.float32)

    first = SIZES.length - SIZES.tested
    attention = SparseAttention(trace, Small(), 2, first)
    view = view_of(trace, 0, trace.queries(0))
    chosen = attention.chosen(view)
    assert (chosen.sum(-1) == 8).all()
    assert chosen[:, :, 4:12].all()  # of equals the first
    assert best_groups(Small().scores(view, 8), view.candidates(4), 8)[0, 0].tolist() == list(
        range(4, 12)
    )
