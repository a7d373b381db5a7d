"""The picture of ``hsswap bench io --plot``: MB/s and processor time by block size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsswap.commands.plot import import_matplotlib

COLOURS = {
    "posix": "#E69F00",
    "uring": "#0072B2",
    "auto": "#56B4E9",
    "gds-compat": "#D55E00",
    "gds": "#F0E442",
    "c-threads": "#999999",
    "c-uring": "#444444",
    "c-threads-sum": "#666666",
    "c-uring-few": "#222222",
    "kvikio": "#009E73",
    "fio": "#CC79A7",
}  # Okabe and Ito 2008


def draw(path: Path, report: dict[str, Any]) -> None:
    """Write the picture of a report: one row an operation, bars at the greatest depth."""
    import_matplotlib()
    from matplotlib.figure import Figure

    rows = report["results"]
    depth = max(row["depth"] for row in rows)
    operations = sorted({row["operation"] for row in rows})
    sizes = sorted({row["block_kib"] for row in rows})
    figure = Figure(figsize=(10, 3.6 * len(operations)), layout="constrained")
    axes = figure.subplots(len(operations), 2, squeeze=False)
    for (left, right), operation in zip(axes, operations, strict=True):
        chosen = [row for row in rows if (row["depth"], row["operation"]) == (depth, operation)]
        arms = list(dict.fromkeys((row["arm"], row["memory"]) for row in chosen))
        for axis, key, label in (
            (left, "mb_per_s", "MB/s"),
            (right, "processor_us_per_block", "us of processor a block"),
        ):
            for number, (arm, memory) in enumerate(arms):
                mine = [row for row in chosen if (row["arm"], row["memory"]) == (arm, memory)]
                values = {row["block_kib"]: row[key] for row in mine}
                places = [place + number / (len(arms) + 1) for place in range(len(sizes))]
                heights = [values.get(size, 0) for size in sizes]
                colour = COLOURS.get(arm, "#000000")
                named, hatch = (arm, "") if memory == "host" else (f"{arm} to {memory}", "//")
                width = 1 / (len(arms) + 1)
                axis.bar(places, heights, width, label=named, color=colour, hatch=hatch)
            axis.set_xticks(range(len(sizes)), [f"{size} KiB" for size in sizes])
            axis.set_ylabel(label)
            axis.set_title(f"{operation}, {depth} in flight")
        left.legend(fontsize="small")
    machine = report["machine"]
    figure.suptitle(f"{machine['processor']}, {machine['kernel']}, {machine['date'][:10]}")
    figure.savefig(path)
