"""The style of the notebooks: plots, tables, one colour per decision, and a sentence where there is no data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from html import escape
from typing import Any

import matplotlib.pyplot as plt
import pyarrow
import pyarrow.compute as pc
from IPython.display import HTML, Markdown, display
from matplotlib.axes import Axes

DECISIONS = {
    "new": "#2a9d8f",
    "duplicate": "#3d6fb6",
    "in_flight": "#b9c0c9",
    "stale": "#e9a93a",
    "conflict": "#c8402f",
}
"""The colour of each decision, in stacking order."""
ENDED, INK, QUIET = "#dcdcdc", "#22272e", "#6b7280"
KINDS = {"document": "#6a4c93", "index": "#bc6c25", "vectors": "#d9a566", "alias": "#6b7a3a"}
OTHER_KINDS = ("#9e2a5b", "#e58fb0", "#4f4a41", "#b3b83f", "#8a6d5c")
WIDTH = 9.0
_FEW_DAYS = 21
ANSWERS = ("seal", "replay", "conflict", "in_flight", "stale")
"""The phases of rows that answer a caller."""
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))

plt.rcParams.update(
    {
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": QUIET,
        "axes.edgecolor": "#c9ced6",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlepad": 12,
        "axes.axisbelow": True,
        "grid.color": "#e8eaee",
        "xtick.color": QUIET,
        "ytick.color": QUIET,
        "legend.frameon": False,
    }
)


def kind_colours(kinds: Iterable[str]) -> dict[str, str]:
    """The colour of each kind. None is the colour of a decision."""
    others = sorted(set(kinds) - set(KINDS))
    return KINDS | {kind: OTHER_KINDS[at % len(OTHER_KINDS)] for at, kind in enumerate(others)}


def answers(table: pyarrow.Table) -> pyarrow.Table:
    """The rows that answer a caller, without granted claims, released leases and ended keys."""
    return table.filter(pc.is_in(table["phase"], pyarrow.array(ANSWERS)))


def milliseconds(column: Any) -> Any:
    return column.cast(pyarrow.int64())


def table(rows: pyarrow.Table | Sequence[Mapping[str, Any]], *, limit: int = 15, empty: str = "none") -> None:
    """Shows rows as an HTML table, with numbers aligned right."""
    listed = rows.to_pylist() if isinstance(rows, pyarrow.Table) else list(rows)
    if not listed:
        note(empty)
        return
    names = list(listed[0])
    numeric = {name for name in names if all(isinstance(row[name], int | float | None) for row in listed)}

    def cell(tag: str, name: str, value: Any) -> str:
        side = "right" if name in numeric else "left"
        return f'<{tag} style="text-align:{side}">{escape(_text(value))}</{tag}>'

    head = "".join(cell("th", name, name) for name in names)
    body = "".join(f"<tr>{''.join(cell('td', name, row[name]) for name in names)}</tr>" for row in listed[:limit])
    more = f"<p>the first {limit} of {len(listed):,}</p>" if len(listed) > limit else ""
    display(HTML(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def note(text: str) -> None:
    display(Markdown(f"*{text}*"))


def moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def span(ms: float) -> str:
    for unit, name in _UNITS:
        if abs(ms) >= unit:
            return f"{ms / unit:.3g} {name}"
    return f"{ms:.0f} ms"


def figure(rows: float = 3.2, **more: Any) -> Any:
    """A figure and its axes. `rows` is its height in inches."""
    return plt.subplots(figsize=(WIDTH, rows), **more)


def stacked(
    axis: Axes, names: Sequence[str], series: Mapping[str, Sequence[float]], colours: Mapping[str, str]
) -> None:
    """A stacked column for each name, with a legend of the series that occur."""
    floor = [0.0] * len(names)
    for what, values in series.items():
        if any(values):
            axis.bar(range(len(names)), values, bottom=floor, color=colours[what], label=what, width=0.75)
            floor = [low + value for low, value in zip(floor, values, strict=True)]
    days(axis, names)
    axis.set_ylim(0, 1.06 * max(floor, default=0) or 1)
    axis.grid(axis="y")
    legend(axis)


def horizontal_bars(
    axis: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str] | str, labels: Sequence[str]
) -> None:
    """Bars from left to right, the first one on top, each with its label at the end."""
    bars = axis.barh(range(len(names)), values, color=colours, height=0.65)
    axis.bar_label(bars, labels=list(labels), padding=4, color=QUIET, fontsize=9)
    axis.set_yticks(range(len(names)), [_short(name) for name in names])
    axis.invert_yaxis()
    axis.margins(x=0.16)
    axis.grid(axis="x")
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)


def days(axis: Axes, names: Sequence[str]) -> None:
    """Labels the x axis with days; with all of them if there are few."""
    step = max(1, -(-len(names) // _FEW_DAYS))
    shown = range(0, len(names), step)
    axis.set_xticks(list(shown), [f"{date.fromisoformat(names[at]):%a}\n{names[at][5:]}" for at in shown], fontsize=8)
    axis.set_xlim(-0.6, max(len(names), 6) - 0.4)  # so that a single day does not fill the plot
    axis.tick_params(axis="x", length=0)


def legend(axis: Axes) -> None:
    """Puts the legend to the right of the plot, in the order of the stack."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        axis.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _short(text: str, most: int = 34) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 :]}"
