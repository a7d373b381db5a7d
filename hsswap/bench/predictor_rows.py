"""The rows of ``hsswap bench predictor``: every method on every context, kept as they are made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hsswap.bench.predictor_lessons
import hsswap.bench.predictor_ours
import hsswap.codec
import hsswap.fitting
import hsswap.predictor.calibration
from hsswap.bench.predictor_certificate import certified_share
from hsswap.bench.predictor_metrics import Figures, Truth
from hsswap.bench.predictor_ours import RATIOS, Codes, MadeUp, Projection
from hsswap.bench.predictor_pool import simulate
from hsswap.bench.predictor_selectors import (
    ArkVale,
    ExactLogits,
    KvSwap,
    LastStep,
    MeanKey,
    Oracle,
    Quest,
    Random,
    ResidentOnly,
    Selector,
)
from hsswap.bench.predictor_sparse import run_sparse
from hsswap.bench.predictor_traces import Trace
from hsswap.bench.predictor_view import BLOCK, I64, Bool, LayerView, best_groups
from hsswap.bf16 import F32, to_float32
from hsswap.models import Llama

FIGURES_VERSION = 2
"""To be raised when a change of the bench changes a figure: kept rows of others are not used."""

KS = (16, 32, 64)
POOLS = (1, 2, 4, 8)
"""In multiples of k."""

POOL_RATIO = 1 / 32
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A selector and the numbers of blocks it is run with."""

    selector: Selector
    ks: tuple[int, ...]

    @property
    def is_ours(self) -> bool:
        """Whether the package's own predictor is behind it."""
        return isinstance(self.selector, Codes | MadeUp)


def methods(adapter: Trace, other: Trace) -> list[Method]:
    """All that is compared. ``adapter``: what KVSwap learns from; ``other``: text of another kind
    than the context, for the rows that learn from the wrong one.
    """
    ours = [Codes(ratio) for ratio in RATIOS]
    wrong = [Codes(ratio, other=other) for ratio in (1 / 32, 1 / 16)]
    selectors: list[Selector] = [
        Oracle(),
        ExactLogits(),
        *ours,
        *wrong,
        Codes(1 / 32, queries=False),
        Codes(1 / 32, remembers=False),
        *(Codes(ratio, stand_in="none") for ratio in (1 / 32, 1 / 16)),
        *(Codes(ratio, stand_in="first tokens") for ratio in (1 / 32, 1 / 16)),
        Projection(8),
        Projection(32),
        KvSwap(8, adapter),
        KvSwap(16, adapter),
        KvSwap(32, adapter),
        KvSwap(8, None),
        Quest(softmax=False),
        Quest(softmax=True),
        ArkVale(),
        MeanKey(),
        LastStep(),
        Random(),
        *(MadeUp(one) for one in (Oracle(), KvSwap(8, adapter), Quest(softmax=False), ArkVale())),
        MadeUp(LastStep()),
    ]
    own_groups = KvSwap(8, adapter, group_tokens=4)  # 256 tokens, and the 400 of its paper
    rest = [Method(own_groups, (16, 25)), Method(ResidentOnly(), (0,))]
    return [Method(selector, KS) for selector in selectors] + rest


MORE_BLOCKS = ("oracle", "codes 1/32", "KVSwap, sigma 8")
"""Run end to end with every k; the others with the first alone, for the time it takes."""


def end_to_end_ks(one: Method) -> tuple[int, ...]:
    """The numbers of blocks that a method is run with end to end."""
    return one.ks if one.selector.name in MORE_BLOCKS or one.ks != KS else KS[:1]


def selection_ks(one: Method) -> tuple[int, ...]:
    """The numbers of blocks for recall: all, but those that cost as much as end to end."""
    return end_to_end_ks(one) if one.selector.remembers else one.ks


def _product_hash() -> str:
    files = [Path(hsswap.codec.__file__), Path(hsswap.fitting.__file__)]
    files += [Path(hsswap.bench.predictor_ours.__file__)]
    files += [Path(hsswap.bench.predictor_lessons.__file__)]
    home = Path(hsswap.predictor.calibration.__file__).parent
    files += [
        home / f"{name}.py" for name in ("basis", "bits", "calibration", "quantiser", "stand_in")
    ]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


PRODUCT_HASH = _product_hash()
"""Of the predictor's code: rows of its earlier forms are not taken for those of this one."""


class RowFile:
    """Finished rows as JSON lines, so that an interrupted run goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: dict[str, list[Row]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    found = json.loads(line)
                except ValueError:  # the last line of a run that was killed
                    continue
                self._made[found["key"]] = found["rows"]

    def has(self, key: str) -> bool:
        """Whether there are rows under ``key``."""
        return key in self._made

    def put(self, key: str, rows: Sequence[Row]) -> None:
        """Keep finished rows."""
        with self._path.open("a") as file:
            # The newline comes first: the line before may have been cut off.
            file.write("\n" + json.dumps({"key": key, "rows": list(rows)}) + "\n")
        self._made[key] = list(rows)

    def rows(self, key: str, make: Callable[[], Sequence[Row]]) -> list[Row]:
        """Those kept under ``key``, or what ``make`` gives, which is then kept."""
        if key not in self._made:
            self.put(key, make())
        return self._made[key]


def view_of(trace: Trace, layer: int, queries: np.ndarray[Any, Any]) -> LayerView:
    """The tested rows of a layer; ``queries``: of the window."""
    tested = trace.sizes.tested
    keys = trace.keys(layer)
    return LayerView.of(layer, queries[-tested:], keys, trace.sizes.length - tested)


def selection_rows(trace: Trace, chosen: Iterable[Method]) -> list[Row]:
    """Recall, mass and error of the output with dense queries, all layers, for blocks of 16."""
    able = [
        one
        for one in chosen
        if one.selector.group_tokens == BLOCK and one.selector.choice_of is None
    ]
    for one in able:
        one.selector.learn(trace)
    found: dict[tuple[str, int], list[Figures]] = {}
    for layer in trace.ranked:
        view = view_of(trace, layer, trace.queries(layer))
        values = np.ascontiguousarray(to_float32(trace.values(layer)).transpose(1, 0, 2))
        truth = Truth(view, values)
        for one in able:
            ks = selection_ks(one)
            made = (one.selector.scores(view, k) for k in ks)
            scores = list(made) if one.selector.remembers else [next(made)] * len(ks)
            for k, own in zip(ks, scores, strict=True):
                found.setdefault((one.selector.name, k), []).append(truth.figures(own, k))
    return [
        {"context": trace.context.name, "method": name, "k": k, **Figures.mean(all_)._asdict()}
        for (name, k), all_ in found.items()
    ]


def end_to_end_rows(model: Llama, trace: Trace, one: Method, rows: int) -> list[Row]:
    """KL, loss and digits over the last ``rows`` tokens, for each k."""
    one.selector.learn(trace)
    made = []
    for k in one.ks:
        figures = run_sparse(model, trace, one.selector, k, rows)
        about = {"context": trace.context.name, "method": one.selector.name, "k": k, "rows": rows}
        made.append(about | {"metadata_bytes": one.selector.metadata_bytes} | asdict_of(figures))
    return made


def asdict_of(figures: Any) -> Row:
    """A named tuple's fields."""
    return dict(figures._asdict())


def left_out_rows(trace: Trace, k: int = KS[0]) -> list[Row]:
    """Mass left out, predicted, certified and true, means of every row, layer and KV head."""
    rows = []
    for ratio in (1 / 32, 1 / 16):
        selector = Codes(ratio)
        selector.learn(trace)
        predicted: list[F32] = []
        true: list[F32] = []
        certified: list[F32] = []
        for layer in trace.ranked:
            view = view_of(trace, layer, trace.queries(layer))
            candidates, scores = view.candidates(), selector.scores(view, k)
            chosen = mask_of(best_groups(scores, candidates, k), candidates.shape[1])
            rest = candidates & ~chosen
            predicted.append(selector.left_out(chosen, view))
            seen = to_float32(trace.basis_queries(layer)).reshape(
                -1, *view.queries[..., 0, :].shape
            )
            certified.append(certified_share(view, selector.codecs[layer], seen, chosen))
            true.append(np.where(rest, view.mass(), 0).sum(-1))
        guess, fact = np.concatenate(predicted), np.concatenate(true)
        rows.append(
            {
                "context": trace.context.name,
                "method": selector.name,
                "k": k,
                "predicted": float(guess.mean()),
                "true": float(fact.mean()),
                "certified": float(np.concatenate(certified).mean()),
                "mean_difference": float(np.abs(guess - fact).mean()),
                "true_less_predicted_p95": float(np.percentile(fact - guess, 95)),
            }
        )
    return rows


def reads_rows(trace: Trace, k: int = KS[0]) -> list[Row]:
    """Units read a step, by pool, with and without look-ahead."""
    selector = Codes(POOL_RATIO)
    selector.learn(trace)
    demanded: list[Bool] = []
    guessed: list[Bool] = []
    mass: list[F32] = []
    for layer in trace.ranked:
        view = view_of(trace, layer, trace.queries(layer))
        candidates = view.candidates()
        exact = mask_of(best_groups(selector.scores(view, k), candidates, k), candidates.shape[1])
        demanded.append(exact)
        mass.append(view.mass())
        if layer == 0:  # its queries come from the embedding: known a layer early as they are
            guessed.append(exact)
            continue
        early = view_of(trace, layer, trace.early_queries(layer))
        scores = selector.scores_of_guess(early, view, k)
        guessed.append(mask_of(best_groups(scores, candidates, k), candidates.shape[1]))
    want, guess, true = np.concatenate(demanded), np.concatenate(guessed), np.concatenate(mass)
    rows = []
    for pool in POOLS:
        for ahead in (None, guess):
            reads = simulate(want, ahead, true, pool * k)
            about = {"context": trace.context.name, "method": selector.name, "k": k}
            about |= {"pool": pool, "look_ahead": ahead is not None}
            rows.append(about | asdict_of(reads) | {"units_wanted": k, "kv_heads": len(want)})
    return rows


def mask_of(chosen: I64, blocks: int) -> Bool:
    """``[H, S, blocks]`` from indices ``[H, S, k]``, -1 for none."""
    mask = np.zeros((*chosen.shape[:2], blocks + 1), np.bool_)
    np.put_along_axis(mask, chosen, True, -1)
    return mask[..., :-1]


def statistics_row(trace: Trace, k: int = KS[0]) -> Row:
    """What the trace is like: figures that synthetic traces must match to mean anything."""
    resident, best, step, early, overlap = [], [], [], [], []
    for layer in trace.ranked:
        view = view_of(trace, layer, trace.queries(layer))
        mass = view.mass()
        chosen = mask_of(best_groups(mass, view.candidates(), k), mass.shape[-1])
        overlap.append((chosen[:, 1:] & chosen[:, :-1]).sum(-1).mean() / k)
        weights = np.where(view.resident, view.weights, 0).sum(-1)
        resident.append(weights.mean())
        held = np.where(chosen, mass, 0).sum(-1)
        best.append((held / np.maximum(1 - weights.mean(1), 1e-9)).mean())
        own = to_float32(trace.queries(layer)[-trace.sizes.tested :])
        step.append(_cosine(own[1:], own[:-1]))
        if layer:
            guess = to_float32(trace.early_queries(layer)[-trace.sizes.tested :])
            early.append(_cosine(own, guess))
    parts = {
        "resident_mass": resident,
        f"best_{k}_of_rest": best,
        "query_cosine_of_steps": step,
        "query_cosine_of_look_ahead": early,
        f"overlap_of_best_{k}": overlap,
    }
    means = {name: round(float(np.mean(values)), 3) for name, values in parts.items()}
    return {"context": trace.context.name, **means}


def _cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    norm = np.sqrt(np.vecdot(a, a) * np.vecdot(b, b))
    return float((np.vecdot(a, b) / norm).mean())
