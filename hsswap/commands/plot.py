"""The picture of ``--plot``: where each token's blocks came from, and the hit rate."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hsswap.commands.decoding import Step
from hsswap.commands.places import why_no_file
from hsswap.errors import ArgumentError, HsswapError

# Colours that differ in brightness too, for print and for the colour-blind (Okabe and Ito 2008).
RESIDENT, AHEAD, WAITED, RATE = "#0072B2", "#8CC5E8", "#D55E00", "#222222"


class PlotError(HsswapError):
    """The picture cannot be drawn or written."""


def check_plot(path: Path) -> None:
    """Raise, before a long run, when ``draw`` could not succeed: no matplotlib, no such folder.

    ArgumentError for the name and its folder, PlotError without matplotlib.
    """
    import_matplotlib()
    if reason := why_no_file(path):
        raise ArgumentError(f"--plot: {reason}")
    if path.suffix.lower() != ".png":
        raise ArgumentError(f"--plot {path}: pictures are PNG; give it a name that ends in .png")


def import_matplotlib() -> None:
    """Load matplotlib with the backend that needs no display. Raises PlotError without it."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError(
            "--plot needs the package matplotlib; run: pip install hsswap[demo]"
        ) from error
    matplotlib.use("agg")


def draw(path: Path, steps: Sequence[Step], title: str) -> None:
    """Write the picture of a run, whole or not at all.

    One bar a token, stacked: blocks that were in slots, read ahead, waited for; a line for the hit
    rate. Raises PlotError.
    """
    import_matplotlib()
    picture = _picture(steps, title)
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(picture)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise PlotError(
            f"--plot {path} cannot be written ({error.strerror}); name another file"
        ) from error


def _picture(steps: Sequence[Step], title: str) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    tokens = range(2, len(steps) + 2)  # the first token is prefill's
    figure = Figure(figsize=(10, 5.5), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    bottom = [0] * len(steps)
    for label, colour, heights in (
        ("in device or host slots", RESIDENT, [step.resident for step in steps]),
        ("read ahead of need", AHEAD, [step.ahead for step in steps]),
        ("waited for", WAITED, [step.waited for step in steps]),
    ):
        above.bar(tokens, heights, 0.85, bottom, label=label, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    above.set_ylabel("blocks attended, all layers")
    above.set_ylim(0, max([1, *bottom]) * 1.18)  # room for the legend above the bars
    above.legend(loc="upper center", ncols=3, frameon=False)
    above.set_title(title, fontsize=11, loc="left")

    rates = [step.hit_rate for step in steps]
    below.plot(tokens, rates, color=RATE, linewidth=1.4, clip_on=False)  # 100 % is on the edge
    below.set_ylabel("hit rate")
    below.set_ylim(min([0.9, *rates]) - 0.02, 1.0)
    below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    below.yaxis.set_major_locator(MaxNLocator(4))
    below.set_xlabel("generated token (the first is prefill's)")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
