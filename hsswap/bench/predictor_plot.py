"""The picture of ``hsswap bench predictor --plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsswap.commands.plot import import_matplotlib

Row = dict[str, Any]
# Okabe and Ito 2008; families of methods by the beginning of their names.
COLOURS = {
    "codes": "#0072B2",
    "projection": "#56B4E9",
    "KVSwap": "#D55E00",
    "Quest": "#E69F00",
    "ArkVale": "#009E73",
    "mean key": "#CC79A7",
    "last step": "#999999",
    "oracle": "#000000",
}


def draw(path: Path, report: Row) -> None:
    """Write the picture of a report: KL by bytes of metadata, error by k, reads by pool."""
    import_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), dpi=110, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _kl_by_bytes(left, report)
    _error_by_k(middle, report)
    _reads_by_pool(right, report)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#DDDDDD", linewidth=0.6)
    machine = report["machine"]
    title = f"{report['model']}, {report['tokens']} tokens, {machine['date'][:10]}"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _kl_by_bytes(axis: Any, report: Row) -> None:
    rows = [row for row in report["means"] if row["k"] == 16 and row["kl"]]
    rows = [row for row in rows if row["metadata_bytes"]]
    for family, colour in COLOURS.items():
        own = [row for row in rows if _is_plain(row["method"], family)]
        own.sort(key=lambda row: row["metadata_bytes"])
        if own:
            x, y = [row["metadata_bytes"] for row in own], [row["kl"] for row in own]
            axis.plot(x, y, "o-", color=colour, label=family)
    for name, style in (("oracle", ":"), ("oracle, stand-in", "--")):
        best = [row["kl"] for row in report["means"] if (row["method"], row["k"]) == (name, 16)]
        for value in best:
            if value is not None:
                axis.axhline(value, color="black", linestyle=style, label=name)
    axis.set(title="KL from dense logits, 16 blocks read", ylabel="nats")
    axis.set(xlabel="bytes of metadata a block and KV head")
    if _has_lines(axis):
        axis.set(xscale="log", yscale="log")


def _error_by_k(axis: Any, report: Row) -> None:
    for family, colour in COLOURS.items():
        name = {"codes": "codes 1/32", "KVSwap": "KVSwap, sigma 8"}.get(family, family)
        rows = [row for row in report["means"] if row["method"] == name]
        own = [row for row in rows if row["error"] is not None]
        if own:
            metadata = own[0]["metadata_bytes"]
            label = f"{name} ({metadata:.0f} B)" if metadata else name
            x, y = [row["k"] for row in own], [row["error"] for row in own]
            axis.plot(x, y, "o-", color=colour, label=label)
    axis.set(title="relative error of a layer's output", xlabel="blocks read (k)")
    axis.set_xticks([16, 32, 64], ["16", "32", "64"])
    if _has_lines(axis):
        axis.set(yscale="log")


def _reads_by_pool(axis: Any, report: Row) -> None:
    unit = report["unit_bytes"] / 2**20
    for ahead, style, part in (
        (False, "o-", "read late, no look-ahead"),
        (True, "s-", "read late, look-ahead"),
        (True, "s:", "read in all, look-ahead"),
    ):
        rows = [row for row in report["reads"] if row["look_ahead"] == ahead]
        pools = sorted({row["pool"] for row in rows})
        heights = []
        for pool in pools:
            own = [row for row in rows if row["pool"] == pool]
            units = [row["late"] + (row["ahead"] if "all" in part else 0) for row in own]
            heights.append(sum(units) / len(units) * own[0]["kv_heads"] * unit)
        if not pools:
            continue
        axis.plot(pools, heights, style, label=part, color="#0072B2" if not ahead else "#D55E00")
    axis.set(title="read a token, all layers and heads", ylabel="MiB")
    axis.set(xlabel="pool, in multiples of k = 16 blocks")
    if _has_lines(axis):
        axis.set(xscale="log", yscale="log")
        axis.set_xticks([1, 2, 4, 8], ["1k", "2k", "4k", "8k"])
        axis.minorticks_off()


def _has_lines(axis: Any) -> bool:
    """Tell the lines apart; without any say so: a logarithmic axis needs a value."""
    if axis.lines:
        axis.legend(fontsize="small", frameon=False)
        return True
    axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")
    return False


def _is_plain(method: str, family: str) -> bool:
    """Whether the row belongs to the family's curve: no special variant of it."""
    special = ("learned", "no ", "own keys", "groups of", "softmax", "stand-in")
    return method.startswith(family) and not any(word in method for word in special)
