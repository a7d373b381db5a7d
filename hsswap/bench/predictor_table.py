"""Means over contexts, and the tables that ``hsswap bench predictor`` prints."""

from __future__ import annotations

from typing import Any, TextIO

from hsswap.commands.output import say

SELECTED = ("docs", "code", "needles-a")
"""Contexts of the means of recall, mass and error, as the numbers to reach were set."""

ANSWERED = (*SELECTED, "needles-b")
"""Those of the mean of KL; digits are the sum of all that have some of these."""

Row = dict[str, Any]


def means(selection: list[Row], end_to_end: list[Row]) -> list[Row]:
    """One row a method and k, over the standard contexts that were run."""
    made = []
    names = list(dict.fromkeys((row["method"], row["k"]) for row in end_to_end + selection))
    for method, k in names:
        row: Row = {"method": method, "k": k}
        ours = [one for one in selection if (one["method"], one["k"]) == (method, k)]
        ours = [one for one in ours if one["context"] in SELECTED]
        for figure in ("recall", "mass", "error"):
            row[figure] = _mean([one[figure] for one in ours])
        run = [one for one in end_to_end if (one["method"], one["k"]) == (method, k)]
        run = [one for one in run if one["context"] in ANSWERED]
        row["kl"] = _mean([one["kl"] for one in run])
        row["kl_low"], row["kl_high"] = _interval(run)
        row["digits_right"] = sum(one["digits_right"] for one in run) if run else None
        row["digits"] = sum(one["digits"] for one in run)
        made.append(row)
    # A method's bytes do not depend on k.
    for row in made:
        known = [one["metadata_bytes"] for one in end_to_end if one["method"] == row["method"]]
        row["metadata_bytes"] = _mean([value for value in known if value is not None])
    return sorted(made, key=lambda row: row["k"] or 16)


def _interval(run: list[Row]) -> tuple[float | None, float | None]:
    """95 % of the mean of KL: contexts are given, their rows a sample."""
    if not run:
        return None, None
    mean = sum(one["kl"] for one in run) / len(run)
    error = sum(one["kl_error"] ** 2 for one in run) ** 0.5 / len(run)
    return round(mean - 1.96 * error, 5), round(mean + 1.96 * error, 5)


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 5) if values else None


def print_tables(report: Row, people: TextIO) -> None:
    """For people: means, reads, and loss."""

    def tell(text: str) -> None:
        say(text, people)

    dense = [one for one in report["contexts"] if one["context"] in ANSWERED]
    right = sum(one["dense_digits_right"] for one in dense)
    tell(f"\n{report['model']}, {report['tokens']} tokens; digits: the dense model finds {right}")
    tell(
        f"{'method':42} {'bytes':>6} {'k':>3} {'recall':>7} {'mass':>6} {'error':>6}  "
        "KL (95 %) digits"
    )
    for row in report["means"]:
        cells = [_cell(row[name], 3) for name in ("recall", "mass", "error")]
        tell(
            f"{row['method']:42} {_cell(row['metadata_bytes'], 0):>6} {row['k']:3} "
            f"{cells[0]:>7} {cells[1]:>6} {cells[2]:>6} {_cell(row['kl'], 4):>6} "
            f"({_cell(row['kl_low'], 3)}-{_cell(row['kl_high'], 3)}) "
            f"{_cell(row['digits_right'], 0):>3}/{row['digits']}"
        )
    tell("\nunits read a step and KV head, of those wanted (look-ahead: late, in all)")
    for row in report["reads"]:
        share = row["late"] / row["units_wanted"]
        whole = (row["late"] + row["ahead"]) / row["units_wanted"]
        ahead = f" {whole:6.1%} with look-ahead" if row["look_ahead"] else ""
        tell(f"{row['context']:14} pool {row['pool']}k  {share:6.1%}{ahead}")
    tell(
        "\nshare left out: true, predicted, off for one head, true less predicted (p95), certified"
    )
    for row in report["left_out"]:
        tell(
            f"{row['context']:14} {row['method']:12} {row['true']:.3f} {row['predicted']:.3f} "
            f"{row['mean_difference']:.3f} {row['true_less_predicted_p95']:.3f} "
            f"{row['certified']:.3f}"
        )
    tell(f"\nnats a token over {report['window']} tokens")
    for row in report["loss"]:
        tell(f"{row['context']:14} {row['method']:12} {row['nats']:.4f}")
    if report["through_swap"]:
        tell("\nas hsswap generate --mode topk decodes, an eighth of the cache in slots (dense)")
    for row in report["through_swap"]:
        digits = f"digits {row['digits_right']} ({row['dense_digits_right']})"
        tell(
            f"{row['context']:14} k {row['k']:3}, codes 1/{1 / row['metadata_ratio']:.0f}: "
            f"{row['nats']:.4f} ({row['dense_nats']:.4f}) nats a token, "
            f"KL {row['kl']:.4f}, {digits}"
        )

    if report["not_run"]:
        tell(f"\n{len(report['not_run'])} pieces were not begun within --limit")


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
