"""Figures of the secondary analyses, each an inline SVG string with a title and a description in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from lastcall.report.canvas import PALETTE, draw
from lastcall.report.wording import bracket, number, percent, signed
from lastcall.results import Interval, Setup
from lastcall.secondary import Answers, Ceilings, HorizonResult, HorizonRouter, QuotaCurves, Section
from lastcall.study import LEARNED_ROUTERS

_HALF, _TALL = 480.0, 350.0
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_FEW = 8
"""Budgets up to which each is marked by a point."""
_DASHED, _DOTTED = (0, (5, 2.5)), (0, (1, 1.6))
_GROUPS = (
    ("reads the bypass state", "blue", "-"),
    ("reads the incoming state", "orange", _DASHED),
    ("learns no weights", "green", _DOTTED),
)
"""Routers by what they see: legend, colour, line."""
_LEADING = (("J32", "blue", "-"), ("C_RP3", "orange", _DASHED), ("I_J32", "green", _DOTTED))
"""Routers drawn with their intervals where there are too many for all."""


@final
@dataclass(frozen=True)
class Drawn:
    """A figure and what is read off it."""

    svg: str
    caption: str


def figures_of(answers: Answers, setup: Setup) -> dict[Section, list[Drawn]]:
    """Figures of every section that has some, one a checkpoint."""
    level = percent(1 - answers["alpha"], 0)
    budget = setup["calls"] / setup["scored"]
    return {
        "curves": [_curves(name, of, budget) for name, of in answers.get("curves", {}).items()],
        "ceilings": [_reliability(name, of, level) for name, of in answers.get("ceilings", {}).items()],
        "horizon": [_drift(of, level) for of in answers.get("horizon", [])],
    }


def _group(router: str) -> int:
    """Place in `_GROUPS`."""
    if router not in LEARNED_ROUTERS:
        return 2
    return int(router.startswith("I_"))


def _curves(checkpoint: str, curve: QuotaCurves, budget: float) -> Drawn:
    """Gain against budget: every router, chance and both ceilings."""
    shares = [k / curve["positions"] for k in curve["calls"]]
    lines = {name: [point["gain"] for point in of] for name, of in curve["routers"].items()}
    lines |= {name: curve[name] for name in ("chance", "knowable", "oracle")}  # type: ignore[literal-required]
    near = min(range(len(shares)), key=lambda i: abs(shares[i] - budget))
    said = [f"{name}: {signed(of[near]['estimate'])}." for name, of in lines.items()]
    svg = draw(
        f"Gain at every budget on {checkpoint}",
        " ".join([f"Gain over never in nats a token, at {percent(shares[near])} of the positions:", *said]),
        _HALF,
        _TALL,
        lambda axes: _paint_curves(axes, shares, lines, budget),
    )
    caption = (
        f"{checkpoint}: gain over never by share of positions called, on a logarithmic scale. Each coloured "
        "line is a router; the thin lines are both ceilings. The higher a line over chance, the better its "
        "router chooses; at 100%, where everything is called, all are the same. Vertical: the locked "
        "budget."
    )
    return Drawn(svg, caption)


def _paint_curves(axes: Axes, shares: list[float], lines: dict[str, list[Interval]], budget: float) -> None:
    axes.axhline(0, color=PALETTE["ink"], linewidth=1, zorder=1)
    axes.axvline(budget, color=PALETTE["muted"], linewidth=0.8, zorder=1)
    looks: Any = {
        "oracle": {"color": PALETTE["ink"], "linewidth": 0.9},
        "knowable": {"color": PALETTE["ink"], "linewidth": 0.9},
        "chance": {"color": PALETTE["muted"], "linewidth": 1.6, "linestyle": (0, (7, 3, 1, 3))},
    }
    named: set[str] = set()
    for name, line in lines.items():
        label, colour, style = _GROUPS[_group(name)]
        look = looks.get(name) or {"color": PALETTE[colour], "linewidth": 1.3, "linestyle": style}
        label = {"oracle": "", "knowable": ""}.get(name, "chance" if name == "chance" else label)
        values = [interval["estimate"] for interval in line]
        look |= {"marker": "o", "markersize": 3} if len(shares) <= _FEW else {}
        axes.plot(shares, values, label=label if label and label not in named else None, **look)
        named.add(label)
        if name in ("oracle", "knowable"):
            peak = max(range(len(values)), key=values.__getitem__)
            where = (shares[peak], values[peak])
            axes.annotate(name, where, (0, 3), textcoords="offset points", ha="center", fontsize=11)
    _share_axis(axes, shares)
    axes.margins(y=0.1)
    axes.set_ylabel("gain over never, nats a token")
    _legend(axes, 2)


def _legend(axes: Axes, columns: int) -> None:
    """Above the axes, where it can hide nothing."""
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns}
    axes.legend(**place, handlelength=2.2, columnspacing=1.6, borderaxespad=0.2, fontsize=11)


def _share_axis(axes: Axes, shares: list[float]) -> None:
    """A logarithmic axis of shares, ticked at round ones."""
    axes.set_xscale("log")
    ticks = [t for t in _TICKS if min(shares) * 0.95 <= t <= max(shares) * 1.05]
    axes.set_xticks(ticks, [f"{100 * t:g}%" for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(False, axis="x")
    axes.set_xlabel("share of positions called, log scale")


def _reliability(checkpoint: str, of: Ceilings, level: str) -> Drawn:
    """Mean utility against mean KL in tenths, with the identity and the corrected slope."""
    bins, scale = of["reliability"]["bins"], of["knowable"]["scale"]
    said = [
        f"{number(b['predicted'])}: {number(b['realised']['estimate'])} "
        f"{bracket(b['realised']['low'], b['realised']['high'], 4)}."
        for b in bins
    ]
    svg = draw(
        f"Utility against the utility expected on {checkpoint}",
        " ".join(["Mean utility by mean KL, nats, in tenths of the positions by KL.", *said]),
        _HALF,
        _TALL,
        lambda axes: _paint_reliability(axes, of, scale),
    )
    caption = (
        f"{checkpoint}: mean utility against the utility that the full branch expects, in tenths of the "
        f"positions by KL, with plain {level} intervals. On the dashed line it gets what it expects; the "
        "solid line is the slope fitted on the calibration split, by which the claim is corrected."
    )
    return Drawn(svg, caption)


def _paint_reliability(axes: Axes, of: Ceilings, scale: float) -> None:
    bins = of["reliability"]["bins"]
    most = max(b["predicted"] for b in bins)
    axes.axhline(0, color=PALETTE["ink"], linewidth=1, zorder=1)
    dashed: Any = {"color": PALETTE["muted"], "linewidth": 1.2, "linestyle": (0, (4, 3))}
    axes.plot([0, most], [0, most], label="as expected", **dashed)
    slope = f"corrected, slope {number(scale, 3)}"
    axes.plot([0, most], [0, scale * most], color=PALETTE["orange"], linewidth=1.4, label=slope)
    for b in bins:
        ends = [b["realised"]["low"], b["realised"]["high"]]
        axes.plot([b["predicted"]] * 2, ends, color=PALETTE["blue"], linewidth=1.5)
    means = [b["realised"]["estimate"] for b in bins]
    blue = PALETTE["blue"]
    axes.plot([b["predicted"] for b in bins], means, "o", color=blue, markersize=5.5, label="tenths")
    _legend(axes, 3)
    axes.set_xlabel("mean KL(full ‖ bypass), nats")
    axes.set_ylabel("mean utility, nats")


def _drift(of: HorizonResult, level: str) -> Drawn:
    """Share called by the unforced rule along the longer block."""
    routers, budget = of["routers"], of["calls"] / of["scored"]
    leading = _leading([r["name"] for r in routers])
    said = [
        f"{r['name']}: {percent(r['drift'][0]['utility']['estimate'])} at the beginning, "
        f"{percent(r['drift'][-1]['utility']['estimate'])} at the end."
        for r in routers
        if r["drift"]
    ]
    svg = draw(
        f"Share called along {of['horizon']:,} predictions on {of['checkpoint']}",
        " ".join([f"By the unforced rule, not at a matched budget; the budget is {percent(budget)}.", *said]),
        _HALF,
        _TALL,
        lambda axes: _paint_drift(axes, routers, leading, budget),
    )
    others = ", the other routers thin and without" if len(leading) < len(routers) else ""
    caption = (
        f"{of['checkpoint']}: share of positions that the unforced rule calls along the longer block, not at "
        f"a matched budget, with plain {level} intervals as bands{others}. Dashed, horizontal: the "
        "budget. A line that leaves it drifts: the frozen threshold no longer means that share."
    )
    return Drawn(svg, caption)


def _leading(names: list[str]) -> dict[str, tuple[str, Any]]:
    """Routers drawn with intervals: those of `_LEADING` that are there, else the first ones."""
    wanted = [name for name, _, _ in _LEADING if name in names] or names[: len(_LEADING)]
    looks = [(colour, style) for _, colour, style in _LEADING]
    return dict(zip(wanted, looks, strict=False))


def _paint_drift(
    axes: Axes, routers: list[HorizonRouter], leading: dict[str, tuple[str, Any]], budget: float
) -> None:
    dashes: Any = (0, (4, 3))
    axes.axhline(budget, color=PALETTE["ink"], linewidth=1.2, linestyle=dashes, zorder=1)
    labelled = False
    for router in sorted(routers, key=lambda r: r["name"] in leading):
        x = [(b["first"] + b["last"]) / 2 for b in router["drift"]]
        shares = [b["utility"] for b in router["drift"]]
        y = [s["estimate"] for s in shares]
        if router["name"] not in leading:
            label = None if labelled else "other routers"
            axes.plot(x, y, color=PALETTE["muted"], linewidth=0.8, alpha=0.8, label=label)
            labelled = True
            continue
        colour, style = leading[router["name"]]
        low, high = [s["low"] for s in shares], [s["high"] for s in shares]
        axes.fill_between(x, low, high, color=PALETTE[colour], alpha=0.18, linewidth=0)
        axes.plot(x, y, color=PALETTE[colour], linewidth=1.8, linestyle=style, label=router["name"])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.grid(False, axis="x")
    _legend(axes, 4)
    axes.set_xlabel("position t in the longer block")
    axes.set_ylabel("share called, unforced")
