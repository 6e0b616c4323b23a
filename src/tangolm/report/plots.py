"""Curves as inline SVG: matplotlib draws, the page's style colours.

Colours and text are written as CSS variables, so that one drawing serves light and dark; text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tangolm.report.runs import RunRecord

# Stand-ins that matplotlib can draw with, replaced by CSS variables afterwards. The order is that of `series`.
STAND_INS = tuple(f"#0{number}fe0{number}" for number in range(1, 9))
INK, FAINT = "#0afe0a", "#0bfe0b"
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
KNOWN = ("TANGO", "Loop Transformer++", "Untied Transformer++")  # always of the same colour, on every page
POINTS = 600  # of a thin line; the thick one is a mean over more steps anyway

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "grid.alpha": 0.45,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


def series(runs: Sequence[RunRecord]) -> dict[str, int]:
    """Architecture -> number of its colour, the same throughout a page."""
    names = dict.fromkeys(run.architecture for run in runs)
    others = [name for name in names if name not in KNOWN]
    order = [*KNOWN, *others]
    return {name: order.index(name) % len(STAND_INS) for name in names}


def training_loss(runs: Sequence[RunRecord]) -> str | None:
    """Training loss against tokens; None where no run has begun."""
    if not any(run.updates for run in runs):
        return None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "loss"}):
        figure, axes = _axes("loss in training (nats per supervised token)")
        for run, look in zip(runs, _looks(runs), strict=True):
            if not run.updates:
                continue
            tokens = _millions([run.tokens_at[record["step"]] for record in run.updates])
            loss = np.array([record["loss"] for record in run.updates])
            every = max(1, len(loss) // POINTS)
            axes.plot(tokens[::every], loss[::every], color=look["color"], linewidth=0.7, alpha=0.35)
            window = smoothing(len(loss))
            mean = np.convolve(loss, np.ones(window) / window, mode="valid")
            middle = tokens[(window - 1) // 2 :][: len(mean)]
            axes.plot(middle[::every], mean[::every], label=look["label"], **_line(look))
        _legend(axes)
        return _svg(figure, "loss", "Training loss against tokens", _described(runs, "training loss"))


def development_nll(runs: Sequence[RunRecord]) -> str | None:
    """Development NLL against tokens, the selected checkpoint ringed; None where there was no evaluation."""
    if not any(run.evaluations for run in runs):
        return None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "nll"}):
        figure, axes = _axes("development NLL (nats per supervised token)")
        for run, look in zip(runs, _looks(runs), strict=True):
            points = [record for record in run.evaluations if record["step"] in run.tokens_at]
            if not points or run.best is None:
                continue
            tokens = _millions([run.tokens_at[record["step"]] for record in points])
            nll = [record["nll"] for record in points]
            line = {**_line(look), "marker": look["marker"], "markersize": 4.5}
            axes.plot(tokens, nll, label=look["label"], **line)
            at = int(np.argmin(nll))
            ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": look["color"]}
            axes.plot(tokens[at], nll[at], linestyle="none", **ring)
        _legend(axes)
        return _svg(figure, "nll", "Development NLL against tokens", _described(runs, "development NLL"))


def smoothing(steps: int) -> int:
    """Steps of the running mean of the training loss."""
    return max(1, steps // 30)


def _axes(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("tokens trained on (millions, padding included)")
    axes.set_ylabel(ylabel)
    return figure, axes


def _looks(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Colour and marker by architecture, dashes by the run's place among those of its architecture."""
    colours = series(runs)
    seen: dict[str, int] = {}
    looks = []
    for run in runs:
        place = seen[run.architecture] = seen.get(run.architecture, -1) + 1
        number = colours[run.architecture]
        looks.append(
            {
                "color": STAND_INS[number],
                "marker": MARKERS[number],
                "dash": DASHES[place % len(DASHES)],
                "label": run.name.replace("$", r"\$"),  # else matplotlib takes it for mathematics
            }
        )
    return looks


def _line(look: dict[str, str]) -> dict[str, Any]:
    return {"color": look["color"], "linestyle": look["dash"], "linewidth": 1.9}


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper right")


def _millions(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens) / 1e6


def _described(runs: Sequence[RunRecord], what: str) -> str:
    """The text for those who do not see the drawing."""
    parts = []
    for run in runs:
        if what == "training loss" and run.updates:
            parts.append(f"{run.name}: from {run.updates[0]['loss']:.2f} to {run.updates[-1]['loss']:.2f}")
        elif what == "development NLL" and run.best and run.last:
            parts.append(f"{run.name}: lowest {run.best['nll']:.3f} at step {run.best['step']}")
    return f"Curves of {what} in nats per token. {'; '.join(parts)}."


def _svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The drawing as an SVG element whose ids are its own, that scales with the page and takes its colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    for number, stand_in in enumerate(STAND_INS):
        text = text.replace(stand_in, f"var(--series-{number})")
    text = text.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", text)
    head = f'<svg role="img" aria-labelledby="{name}-title {name}-description" '
    label = (
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-description">{escape(description)}</desc>'
    )
    text = re.sub(
        r'(<svg [^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    opening = text.index(">") + 1
    return head + text[len("<svg ") : opening] + label + text[opening:]
