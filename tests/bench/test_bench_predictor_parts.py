"""What a selector sees, the rules themselves, the figures, and the pool."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsswap.bench.predictor_metrics import Truth
from hsswap.bench.predictor_pool import simulate
from hsswap.bench.predictor_rows import Row, RowFile, view_of
from hsswap.bench.predictor_run import Piece, begin_order
from hsswap.bench.predictor_selectors import (
    ArkVale,
    ExactLogits,
    KvSwap,
    LastStep,
    Oracle,
    Quest,
    ResidentOnly,
)
from hsswap.bench.predictor_table import means
from hsswap.bench.predictor_view import best_groups
from tests.bench.predictor_rig import float64_weights, random_view, tiny_model, tiny_trace


def test_masses_against_float64() -> None:
    view = random_view()
    for head, query, row in np.ndindex(3, 2, 5):
        weights = float64_weights(view, head, query, row)
        padded = np.zeros(421)
        padded[: len(weights)] = weights
        assert np.abs(view.weights[head, query, row] - padded).max() < 1e-6
        blocks = padded[:416].reshape(26, 16).sum(1)
        assert np.abs(view.query_mass()[head, query, row] - blocks).max() < 1e-6
        end = view.first + row + 1
        recent = (end // 16 - 8) * 16
        resident = padded[:16].sum() + padded[recent:end].sum()
        found = np.exp(view.resident_lse - view.total_lse)[head, query, row]
        assert abs(found - resident) < 1e-5
        lse = np.log(blocks[: end // 16]) + view.total_lse[head, query, row]
        assert np.abs(view.block_lse(head)[query, row, : end // 16] - lse).max() < 1e-4


def test_residents_and_candidates_are_everything_once() -> None:
    view = random_view()
    for group_tokens in (4, 16):
        candidates = np.repeat(view.candidates(group_tokens), group_tokens, axis=1)
        candidates = np.pad(candidates, ((0, 0), (0, 421 - candidates.shape[1])))
        assert not (candidates & view.resident).any()
        for row in range(5):
            seen = (candidates | view.resident)[row]
            assert seen[: view.first + row + 1].all()
            assert not seen[view.first + row + 1 :].any()
            assert 128 <= view.lengths[row] - view.cuts[row] < 144


def test_short_texts_have_no_candidates() -> None:
    assert not random_view(rows=3, length=140).candidates().any()
    assert random_view(rows=3, length=140).resident[-1].all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_best_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    blocks, k = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 14))
    numbers = st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0, np.nan])
    scores = data.draw(st.lists(numbers, min_size=blocks, max_size=blocks))
    usable = data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
    found = best_groups(np.array(scores, np.float32)[None, None], np.array(usable)[None], k)[0, 0]
    able = [at for at in range(blocks) if usable[at] and scores[at] > -np.inf]
    able.sort(key=lambda at: -scores[at])
    wanted = able[:k]
    assert found.tolist()[: len(wanted)] == wanted
    assert (found[len(wanted) :] == -1).all()


def test_figures_against_loops() -> None:
    view = random_view()
    random = np.random.default_rng(8)
    values = random.standard_normal((3, 421, 7)).astype(np.float32)
    scores = random.random((3, 5, 26), np.float32)
    figures = Truth(view, values).figures(scores, 4)
    recall, mass, error = [], [], []
    for head, row in np.ndindex(3, 5):
        able = np.flatnonzero(view.candidates()[row])
        true = view.mass()[head, row]
        ours = able[np.argsort(-scores[head, row, able])[:4]]
        best = able[np.argsort(-true[able])[:4]]
        recall.append(len(set(ours) & set(best)) / 4)
        mass.append(true[ours].sum() / true[best].sum())
        off, norm = 0.0, 0.0
        for query in range(2):
            weights = float64_weights(view, head, query, row)
            kept = (
                weights * (view.resident[row] | np.isin(np.arange(421) // 16, ours))[: len(weights)]
            )
            full = weights @ values[head, : len(weights)]
            sparse = kept @ values[head, : len(weights)] / kept.sum()
            off += ((full - sparse) ** 2).sum()
            norm += (full**2).sum()
        error.append(np.sqrt(off / norm))
    wanted = (np.mean(recall), np.mean(mass), np.mean(error))
    assert np.allclose(figures, wanted, atol=1e-5)


def test_the_oracle_and_everything() -> None:
    view = random_view()
    values = np.ones((3, 421, 4), np.float32)
    values[:, ::2] = 3
    truth = Truth(view, values)
    assert truth.figures(Oracle().scores(view, 4), 4)[:2] == (1.0, 1.0)
    assert truth.figures(np.zeros((3, 5, 26), np.float32), 26).error < 1e-6
    nothing = truth.figures(ResidentOnly().scores(view, 4), 4)
    assert nothing[:2] == (0.0, 0.0)
    assert nothing.error > 0


def test_quest_is_a_bound_and_arkvale_a_mean_over_corners() -> None:
    view = random_view()
    greatest = view.logits[..., :416].reshape(3, 2, 5, 26, 16).max(-1)
    bound = Quest(softmax=False).scores(view, 1)
    assert (bound >= greatest.max(1) - 1e-5).all()
    able = view.candidates()
    share = ArkVale().scores(view, 1)[:, able].reshape(3, -1)
    assert (share > 0).all()
    assert np.allclose(np.where(able, ArkVale().scores(view, 1), 0).sum(-1), 2, atol=1e-5)


def test_kvswap_with_all_dims_is_the_mean_logit(tmp_path: Path) -> None:
    trace = tiny_trace(tiny_model(tmp_path), tmp_path)
    rule = KvSwap(1, trace)
    rule.learn(trace)
    view = view_of(trace, 1, trace.queries(1))
    mean = view.logits.mean((0, 1))
    exact = mean[:, : 71 * 16].reshape(len(mean), 71, 16).max(-1)
    able = view.candidates()
    found = rule.scores(view, 1)
    # Its sums are not scaled, and an average of dims: the order counts.
    ratio = found[0][able] / exact[able]
    assert np.abs(ratio / ratio.mean() - 1).max() < 0.05
    assert rule.metadata_bytes == 16 * 2 * 32 / 2
    assert (ExactLogits().scores(view, 1)[0] != exact).any()  # that one is a head's own


def test_last_step_knows_the_step_before() -> None:
    view = random_view()
    scores = LastStep().scores(view, 4)
    assert (scores[:, 1:] == view.mass()[:, :-1]).all()
    assert (np.diff(scores[:, 0]) > 0).all()


def test_pools_against_sets() -> None:
    random = np.random.default_rng(4)
    steps, blocks, k, capacity = 9, 14, 3, 5
    demanded = np.zeros((2, steps, blocks), np.bool_)
    guessed = np.zeros_like(demanded)
    for pool, step in np.ndindex(2, steps):
        demanded[pool, step, random.choice(blocks, k, replace=False)] = True
        guessed[pool, step, random.choice(blocks, k, replace=False)] = True
    mass = random.random((2, steps, blocks)).astype(np.float32)
    for guess in (None, guessed):
        late = ahead = 0
        for pool in range(2):
            worth: dict[int, float] = {}
            for step in range(steps):
                for wanted, is_late in ((guess, False), (demanded, True)):
                    if wanted is None:
                        continue
                    asked = np.flatnonzero(wanted[pool, step]).tolist()
                    new = [block for block in asked if block not in worth]
                    if step >= steps // 2:
                        late, ahead = (
                            (late + len(new), ahead) if is_late else (late, ahead + len(new))
                        )
                    worth |= dict.fromkeys(new, 0.0)
                    while len(worth) > capacity:
                        victims = [block for block in worth if block not in asked]
                        # No two masses are equal but those never attended: latest stays.
                        del worth[min(victims, key=lambda block: (worth[block], block))]
                for block in worth:
                    worth[block] *= 0.9
                    if demanded[pool, step, block]:
                        worth[block] += float(mass[pool, step, block])
        found = simulate(demanded, guess, mass, capacity)
        counted = 2 * (steps - steps // 2)
        assert found.late == pytest.approx(late / counted)
        assert found.ahead == pytest.approx(ahead / counted)


def test_rows_are_made_once_and_survive_a_kill(tmp_path: Path) -> None:
    calls = []

    def make() -> list[Row]:
        calls.append(1)
        return [{"a": len(calls)}]

    path = tmp_path / "rows.jsonl"
    assert RowFile(path).rows("x", make) == [{"a": 1}]
    with path.open("a") as file:
        file.write('{"key": "y", "rows": [{"a"')
    kept = RowFile(path)
    assert kept.rows("x", make) == [{"a": 1}]
    assert kept.rows("y", make) == [{"a": 2}]
    assert RowFile(path).rows("y", make) == [{"a": 2}]
    assert len(calls) == 2


def test_pieces_are_begun_by_table_then_by_their_place_in_all_contexts() -> None:
    made = [
        Piece(table, context, f"{table} {context} {number}", list)
        for context in ("docs", "code")
        for table, count in (("end_to_end", 2), ("contexts", 1), ("selection", 2))
        for number in range(count)
    ]
    assert [made[at].key for at in begin_order(made)] == [
        "selection docs 0",
        "selection code 0",
        "selection docs 1",
        "selection code 1",
        "contexts docs 0",
        "contexts code 0",
        "end_to_end docs 0",
        "end_to_end code 0",
        "end_to_end docs 1",
        "end_to_end code 1",
    ]


def test_means_are_of_the_standard_contexts() -> None:
    selection = [
        {"context": name, "method": "m", "k": 16, "recall": value, "mass": 1.0, "error": 0.5}
        for name, value in (("docs", 0.5), ("code", 0.7), ("needles-a", 0.9), ("mine.txt", 0.0))
    ]
    run = [
        {
            "context": name, "method": "m", "k": 16, "kl": value, "kl_error": value / 5,
            "digits_right": 3, "digits": 5,
            "metadata_bytes": 128.0,
        }
        for name, value in (("docs", 0.1), ("needles-b", 0.3), ("recite-many", 9.0))
    ]  # fmt: skip
    row = means(selection, run)[0]
    assert row["recall"] == pytest.approx(0.7)
    assert row["kl"] == pytest.approx(0.2)
    spread = 1.96 * np.hypot(0.02, 0.06) / 2  # of a mean of two
    assert row["kl_low"] == pytest.approx(0.2 - spread, abs=1e-5)
    assert row["kl_high"] == pytest.approx(0.2 + spread, abs=1e-5)
    assert (row["digits_right"], row["digits"], row["metadata_bytes"]) == (6, 10, 128.0)
    assert json.dumps(row)
