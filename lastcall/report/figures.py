"""The report's figures, each an inline SVG string with a title and a description in words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from lastcall.report.canvas import PALETTE, draw
from lastcall.report.wording import LOOKS, bracket, by_checkpoint, number, percent, plain, signed, title
from lastcall.results import (
    CalibrationBin,
    CheckpointResult,
    ComparisonResult,
    Family,
    Histogram,
    RouterResult,
)

_WIDE, _HALF, _TALL = 960.0, 480.0, 320.0
_ROW = 28.0


def forest(family: Family, threshold: float) -> str:
    """Every comparison of a family: estimate, plain interval (thick), simultaneous (thin), verdict.

    The shaded band is ± `threshold`, the practical size.
    """
    groups = by_checkpoint(family)
    rows = len(family["comparisons"]) + len(groups)
    said = [
        f"{title(c)} on {c['checkpoint']}: {signed(c['delta']['estimate'])}, simultaneous interval "
        f"{bracket(c['simultaneous_low'], c['simultaneous_high'])}, {c['verdict']}."
        for c in family["comparisons"]
    ]
    return draw(
        f"Family of comparisons: {family['name']}",
        " ".join([f"The practical size is {plain(threshold)} nats a token.", *said]),
        _WIDE,
        46 + _ROW * rows,
        lambda axes: _paint_forest(axes, groups, threshold),
    )


def _paint_forest(axes: Axes, groups: list[tuple[str, list[ComparisonResult]]], threshold: float) -> None:
    axes.axvspan(-threshold, threshold, color=PALETTE["band"], linewidth=0, zorder=0)
    for edge in (-threshold, threshold):
        axes.axvline(edge, color=PALETTE["muted"], linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
    axes.axvline(0, color=PALETTE["ink"], linewidth=1, zorder=1)
    labels: list[tuple[str, bool]] = []
    for checkpoint, comparisons in groups:
        labels.append((checkpoint, True))
        for comparison in comparisons:
            _forest_row(axes, comparison, -len(labels))
            labels.append((title(comparison), False))
    axes.set_yticks([-i for i in range(len(labels))], [text for text, _ in labels])
    for tick, (_, heading) in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_color(PALETTE["ink"])
        tick.set_fontweight("bold" if heading else "normal")
    axes.set_ylim(0.6 - len(labels), 0.6)
    axes.grid(False, axis="y")
    axes.margins(x=0.04)
    axes.set_xlabel(f"Δ, nats a token: right of zero favours A. Shaded: under ±{plain(threshold)}")


def _forest_row(axes: Axes, comparison: ComparisonResult, y: int) -> None:
    look, delta = LOOKS[comparison["verdict"]], comparison["delta"]
    colour = PALETTE[look.colour]
    ends = [comparison["simultaneous_low"], comparison["simultaneous_high"]]
    axes.plot(ends, [y, y], color=colour, linewidth=1.3, marker="|", markersize=7, zorder=2)
    axes.plot([delta["low"], delta["high"]], [y, y], color=colour, linewidth=4, zorder=3)
    axes.plot(
        [delta["estimate"]],
        [y],
        look.marker,
        color=colour,
        markerfacecolor=colour if look.filled else PALETTE["paper"],
        markersize=8,
        markeredgewidth=1.6,
        zorder=4,
    )
    for x, words, ink in ((1.02, look.symbol, look.colour), (1.045, comparison["verdict"], "ink")):
        axes.text(
            x, y, words, transform=axes.get_yaxis_transform(), va="center", fontsize=11.5, color=PALETTE[ink]
        )


def utility_histogram(checkpoint: CheckpointResult) -> str:
    """Distribution of the signed utility on a logarithmic share axis, so that the tails are seen."""
    histogram, positive = checkpoint["histogram"], checkpoint["share_positive"]["estimate"]
    edges = histogram["edges"]
    return draw(
        f"Utility of a call on {checkpoint['name']}",
        f"{percent(positive)} of scored positions have positive utility; {percent(histogram['below'], 2)} "
        f"lie below {plain(edges[0])} nats, {percent(histogram['above'], 2)} above {plain(edges[-1])}.",
        _HALF,
        _TALL,
        lambda axes: _paint_histogram(axes, histogram, positive),
    )


def _paint_histogram(axes: Axes, histogram: Histogram, positive: float) -> None:
    for (left, right), share in zip(pairwise(histogram["edges"]), histogram["shares"], strict=True):
        middle = (left + right) / 2
        straddles = left < 0 < right
        colour = "muted" if straddles else "blue" if middle > 0 else "orange"
        if share > 0:
            axes.bar(
                left, share, right - left, align="edge", color=PALETTE[colour], edgecolor=PALETTE["paper"]
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.yaxis.minorticks_off()
    axes.axvline(0, color=PALETTE["ink"], linewidth=1)
    axes.grid(False, axis="x")
    for x, side, words in (
        (0.0, "left", f"{percent(1 - positive)} zero or less"),
        (1.0, "right", f"{percent(positive)} above zero"),
    ):
        axes.text(x, 1.02, words, transform=axes.transAxes, ha=side, color=PALETTE["ink"])
    for x, side, share, words in (
        (0.0, "left", histogram["below"], f"below {plain(histogram['edges'][0])}"),
        (1.0, "right", histogram["above"], f"above {plain(histogram['edges'][-1])}"),
    ):
        note = f"{percent(share, 2)} {words}"
        axes.text(x, 0.93, note, transform=axes.transAxes, ha=side, fontsize=11, color=PALETTE["muted"])
    axes.set_xlabel("utility u(t), nats")
    axes.set_ylabel("share of positions, log scale")


def utility_by_position(checkpoint: CheckpointResult) -> str:
    """Mean utility along the block, with plain intervals."""
    bins = checkpoint["by_position"]
    said = [
        f"{b['first']} to {b['last']}: {signed(b['utility']['estimate'])} "
        f"{bracket(b['utility']['low'], b['utility']['high'])}."
        for b in bins
    ]
    return draw(
        f"Mean utility by position on {checkpoint['name']}",
        " ".join(["Mean utility in nats a token by position in the block.", *said]),
        _HALF,
        _TALL,
        lambda axes: _paint_positions(axes, checkpoint),
    )


def _paint_positions(axes: Axes, checkpoint: CheckpointResult) -> None:
    mean = checkpoint["gain_full"]["estimate"]
    axes.axhline(0, color=PALETTE["ink"], linewidth=1, zorder=1)
    axes.axhline(mean, color=PALETTE["muted"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for b in checkpoint["by_position"]:
        middle, utility = (b["first"] + b["last"]) / 2, b["utility"]
        axes.plot([middle] * 2, [utility["low"], utility["high"]], color=PALETTE["blue"], linewidth=1.6)
        axes.plot([middle], [utility["estimate"]], "o", color=PALETTE["blue"], markersize=5.5)
    axes.grid(False, axis="x")
    axes.margins(y=0.08)
    axes.set_xlabel("position t in the block")
    axes.set_ylabel("mean utility, nats a token")


def calibration(checkpoint: CheckpointResult) -> str:
    """Predicted against realised utility in tenths, for J32 and C_RP3 where fitted, else the first two."""
    curves = checkpoint["calibration"]
    wanted = [name for name in ("J32", "C_RP3") if name in curves]
    chosen = {name: curves[name] for name in (wanted if len(wanted) == 2 else list(curves)[:2])}
    said = [
        f"{name}: predicted {', '.join(number(b['predicted'], 3) for b in bins)}; realised "
        f"{', '.join(number(b['realised']['estimate'], 3) for b in bins)}."
        for name, bins in chosen.items()
    ]
    return draw(
        f"Predicted against realised utility on {checkpoint['name']}",
        " ".join(["Mean utility in nats in tenths of the positions by prediction.", *said]),
        _HALF,
        _TALL,
        lambda axes: _paint_calibration(axes, chosen),
    )


def _paint_calibration(axes: Axes, chosen: dict[str, list[CalibrationBin]]) -> None:
    axes.axline((0, 0), slope=1, color=PALETTE["muted"], linewidth=1, linestyle=(0, (4, 3)))
    looks = (("blue", "o", PALETTE["blue"]), ("orange", "s", PALETTE["paper"]))
    for (name, bins), (colour, marker, fill) in zip(chosen.items(), looks, strict=False):
        x = [b["predicted"] for b in bins]
        for b in bins:
            ends = [b["realised"]["low"], b["realised"]["high"]]
            axes.plot([b["predicted"]] * 2, ends, color=PALETTE[colour], linewidth=1.4)
        y = [b["realised"]["estimate"] for b in bins]
        axes.plot(x, y, color=PALETTE[colour], linewidth=0.8)
        points = axes.plot(x, y, marker, color=PALETTE[colour], markersize=6, label=name)
        points[0].set_markerfacecolor(fill)
    if chosen:
        axes.legend(loc="upper left", handletextpad=0.3, borderaxespad=0.2)
    axes.set_xlabel("predicted utility, nats (dashed: as realised)")
    axes.set_ylabel("realised utility, nats")


def router_gains(checkpoint: CheckpointResult) -> str:
    """Each policy's gain over never, in nats and as a share of the oracle's, under the two ceilings."""
    shown = [r for r in checkpoint["routers"] if r["kind"] != "ceiling" and r["name"] != "never"]
    ceilings = [r for r in checkpoint["routers"] if r["kind"] == "ceiling"]
    said = [f"{r['name']}: {percent(r['oracle_share'])} of the oracle's." for r in [*shown, *ceilings]]
    return draw(
        f"Gain over never on {checkpoint['name']}",
        " ".join(["Gain of each policy over calling never.", *said]),
        _HALF,
        100 + 20 * (len(shown) + len(ceilings)),
        lambda axes: _paint_gains(axes, shown, ceilings),
    )


def _paint_gains(axes: Axes, shown: list[RouterResult], ceilings: list[RouterResult]) -> None:
    axes.axvline(0, color=PALETTE["ink"], linewidth=1, zorder=1)
    for y, ceiling in enumerate(ceilings, start=1):
        gain = ceiling["gain"]["estimate"]
        axes.plot([gain, gain], [0.4 - len(shown), y + 0.3], color=PALETTE["muted"], linewidth=1.4)
        axes.annotate(
            ceiling["name"],
            (gain, y),
            (-5, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=11,
        )
    for row, router in enumerate(shown):
        _gain_row(axes, router, -row)
    axes.set_yticks([-i for i in range(len(shown))], [r["name"] for r in shown])
    for tick in axes.get_yticklabels():
        tick.set_color(PALETTE["ink"])
    axes.set_ylim(0.4 - len(shown), len(ceilings) + 0.6)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("gain over never, nats a token")
    oracle = next((r["gain"]["estimate"] for r in ceilings if r["name"] == "oracle"), 0.0)
    if oracle > 0:
        top = axes.secondary_xaxis("top", functions=(_scale(100 / oracle), _scale(oracle / 100)))
        top.set_xlabel("share of the oracle's gain, %")


def _scale(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def _gain_row(axes: Axes, router: RouterResult, y: int) -> None:
    gain = router["gain"]
    colour, marker = {"learned": ("blue", "o"), "fixed": ("orange", "s")}.get(router["kind"], ("muted", "D"))
    axes.plot([gain["low"], gain["high"]], [y, y], color=PALETTE[colour], linewidth=2)
    axes.plot(
        [gain["estimate"]],
        [y],
        marker,
        color=PALETTE[colour],
        markersize=6,
        markerfacecolor=PALETTE[colour] if router["kind"] == "learned" else PALETTE["paper"],
        markeredgewidth=1.4,
    )
