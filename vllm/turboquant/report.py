# SPDX-License-Identifier: Apache-2.0
"""Measurements as one HTML page that needs nothing else: a table, and plots drawn as SVG."""

import html
import io
import re

import matplotlib
from matplotlib.figure import Figure

from vllm.turboquant.quality import Measured

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 900px; margin: 2em auto; color: #222 }
table { border-collapse: collapse } td, th { padding: 2px 14px; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f2f2f2 }
svg { width: 100%; height: auto }
"""
_OURS, _OTHER, _VALUE = "#c2410c", "#64748b", "#0369a1"
_COLUMNS = 5
_SILENT = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the page names no other page


def page(model: str, rows: list[Measured]) -> str:
    """The page for one model."""
    title = f"KV cache formats of {html.escape(model)}"
    parts = [f"<h1>{title}</h1>", _table(rows)]
    if any(row.kl > 0 for row in rows):
        parts.append(_svg("Loss against bits", _loss_against_bits(rows)))
    for row in rows:
        name = html.escape(row.format)
        if row.layers:
            parts.append(_svg(f"{name}: KL of each layer's cache alone", _loss_by_layer(row)))
        if row.scales:
            parts.append(_svg(f"{name}: scale by position, and the TDSF formula", _curves(row)))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def _table(rows: list[Measured]) -> str:
    heads = ("format", "bits per element", "KL, nats per token", "perplexity", "same top token")
    lines = ["".join(f"<th>{head}</th>" for head in heads)]
    for row in rows:
        cells = (
            html.escape(row.format),
            f"{row.bits_per_element:.3f}",
            f"{row.kl:.5f}",
            f"{row.perplexity:.3f}",
            f"{100 * row.top1:.2f} %",
        )
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"


def _loss_against_bits(rows: list[Measured]) -> Figure:
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        if row.kl > 0:
            color = _OURS if row.format.startswith("tdsf_") else _OTHER
            axes.scatter(row.bits_per_element, row.kl, color=color)
            place = (row.bits_per_element, row.kl)
            axes.annotate(row.format, place, xytext=(6, 3), textcoords="offset points")
    axes.set(yscale="log", xlabel="stored bits per element", ylabel="KL, nats per token")
    axes.margins(x=0.15, y=0.1)
    axes.grid(alpha=0.3)
    return figure


def _loss_by_layer(row: Measured) -> Figure:
    layers = row.layers or {}
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(layers)), list(layers.values()), color=_OURS)
    axes.set(xlabel="layer", ylabel="KL, nats per token")
    return figure


def _curves(row: Measured) -> Figure:
    """A panel per layer: log2 of the scales tokens got (thin) and of the formula (thick)."""
    scales = row.scales or {}
    lines = -(-len(scales) // _COLUMNS)
    figure = Figure(figsize=(9, 1.5 * lines), layout="constrained")
    panels = list(figure.subplots(lines, _COLUMNS, sharex=True, squeeze=False).flat)
    for index, (panel, layer) in enumerate(zip(panels, scales.values())):
        for found, prior, color in (
            (layer.key, layer.key_prior, _OURS),
            (layer.value, layer.value_prior, _VALUE),
        ):
            places = range(1, len(found) + 1)
            panel.plot(places, found, color=color, alpha=0.35, linewidth=0.5)
            panel.plot(places, prior, color=color, linewidth=1.2)
        shares = " ".join(f"{share:.0%}" for share in layer.explained())
        panel.set_title(f"layer {index}: {shares}", fontsize=7)
        panel.tick_params(labelsize=6)
    for panel in panels[len(scales) :]:
        panel.set_axis_off()
    label = "log2 of scales, keys red and values blue; shares of their variance the formula predicts"
    figure.supxlabel(f"position. {label}", fontsize=8)
    return figure


def _svg(title: str, figure: Figure) -> str:
    """The figure as an element of the page; equal figures give equal text."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata=_SILENT)
    drawing = text.getvalue()
    # Elements of several drawings on one page must not share an id.
    prefix = re.sub(r"\W", "", title)
    drawing = re.sub(r'(id="|href="#|url\(#)', rf"\1{prefix}-", drawing[drawing.index("<svg") :])
    return f"<h2>{title}</h2>\n{drawing}"
