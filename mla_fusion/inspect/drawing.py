"""The prologue as an inline SVG, with the names of the graph's own nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class _Box:
    key: str
    text: str
    column: int
    row: float
    out: bool = False


_WIDTH, _HEIGHT, _STEP, _ROW, _LEFT, _TOP = 112, 40, 160, 62, 20, 44

_BOXES = (
    _Box("x", "x", 0, 1.5, True),
    _Box("w_dq", "W_dq", 1, 0.5),
    _Box("norm_q", "RMSNorm", 2, 0.5),
    _Box("w_uq", "W_uq_qr", 3, 0.5),
    _Box("w_uk", "W_uk", 4, 0),
    _Box("rope_q", "RoPE", 4, 1),
    _Box("query", "query", 5, 0, True),
    _Box("query_rope", "query_rope", 5, 1, True),
    _Box("w_dkv", "W_dkv_kr", 1, 2.5),
    _Box("norm_k", "RMSNorm", 3, 2),
    _Box("rope_k", "RoPE", 3, 3),
    _Box("kv_cache", "kv_cache", 5, 2, True),
    _Box("kr_cache", "kr_cache", 5, 3, True),
)
_WIRES = (
    ("x", "w_dq", ""),
    ("w_dq", "norm_q", ""),
    ("norm_q", "w_uq", ""),
    ("w_uq", "w_uk", "nope"),
    ("w_uq", "rope_q", "rope"),
    ("w_uk", "query", ""),
    ("rope_q", "query_rope", ""),
    ("x", "w_dkv", ""),
    ("w_dkv", "norm_k", "c_kv"),
    ("w_dkv", "rope_k", "k_pe"),
    ("norm_k", "kv_cache", "rows"),
    ("rope_k", "kr_cache", "rows"),
)


def prologue(nodes: Sequence[str], replaced: Mapping[str, str], dims: Mapping[str, Any]) -> str:
    """SVG text. ``nodes`` are a fusion's (q down, norm, up, [rope up], absorb, rope, kv down, ...)."""
    names = _node_names(nodes, replaced)
    boxes = {box.key: box for box in _BOXES}
    width = _LEFT * 2 + _STEP * 5 + _WIDTH
    height = _TOP + _ROW * 4 + 10
    parts = [
        f'<svg class="drawing" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(_description(dims))}"><title>{escape(_description(dims))}</title>',
        f'<rect class="kernel" x="{_LEFT + _STEP - 16}" y="22" width="{_STEP * 3 + _WIDTH + 32}" '
        f'height="{height - 30}" rx="8"/>',
        f'<text class="title" x="{_LEFT + _STEP - 10}" y="16">npu_mla_prolog_v3_functional</text>',
    ]
    parts += [_wire(boxes[start], boxes[end], label) for start, end, label in _WIRES]
    parts += [_box(box, names.get(box.key, "")) for box in _BOXES]
    return "".join([*parts, "</svg>"])


def _description(dims: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in dims.items())
    return f"Dataflow of the MLA prologue: {sizes}"


def _node_names(nodes: Sequence[str], replaced: Mapping[str, str]) -> dict[str, str]:
    """Which node stands at which box. The order of ``Candidate.nodes``; shared projections occur once there."""
    names = {output: node for node, output in replaced.items()}
    if "kv_cache" not in names and "c_kv" in names:
        names["kv_cache"], names["kr_cache"] = names["c_kv"], names.get("k_pe", "")
    if len(nodes) == 8:
        keys = ("w_dq", "norm_q", "w_uq", "w_uk", "rope_q", "w_dkv", "norm_k", "rope_k")
        names.update(zip(keys, nodes, strict=True))
    return names


def _place(box: _Box) -> tuple[float, float]:
    return _LEFT + box.column * _STEP, _TOP + box.row * _ROW


def _box(box: _Box, node: str) -> str:
    x, y = _place(box)
    middle = x + _WIDTH / 2
    shown = node if len(node) <= 16 else node[:15] + "…"
    below = f'<text class="node" x="{middle:g}" y="{y + 33:g}">{escape(shown)}</text>' if node else ""
    tooltip = f"<title>{escape(box.text)}{': node ' + escape(node) if node else ''}</title>"
    return (
        f'<g>{tooltip}<rect class="{"out" if box.out else "box"}" x="{x:g}" y="{y:g}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" rx="5"/><text x="{middle:g}" y="{y + (18 if node else 25):g}">{escape(box.text)}</text>'
        f"{below}</g>"
    )


def _wire(start: _Box, end: _Box, label: str) -> str:
    (x0, y0), (x1, y1) = _place(start), _place(end)
    x0, y0, y1 = x0 + _WIDTH, y0 + _HEIGHT / 2, y1 + _HEIGHT / 2
    bend = x1 - 34  # left of the kernel's frame, and far enough from the box for a label of four letters
    path = f"M{x0:g} {y0:g}H{bend:g}V{y1:g}H{x1 - 5:g}" if y0 != y1 else f"M{x0:g} {y0:g}H{x1 - 5:g}"
    tip = f'<path class="tip" d="M{x1:g} {y1:g}l-7 -3.5v7z"/>'
    text = ""
    if label:
        middle = (x0 + x1) / 2 if y0 == y1 else (bend + x1) / 2 - 1
        above = -6 if y1 <= y0 else 14  # outside the fork
        text = f'<text class="node" x="{middle:g}" y="{y1 + above:g}">{label}</text>'
    return f'<path class="wire" d="{path}"/>{tip}{text}'
