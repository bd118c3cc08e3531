"""Rows of a per-tile quantised cache (kv_cache_quant_mode 3): ``int8 c_kv | bfloat16 k_pe | float32
scales``; in a float format of A5 its numbers in the place of int8.

The nodes between the latent, the key and the bytes are held against the format's definition, in
exact arithmetic. Another order of the parts, another tile or a truncation is another function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import is_reshape, one_dtype
from mla_fusion.fx.program import literals, nodes_between
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import same
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached, users
from mla_fusion.meta.binder import size_of
from mla_fusion.meta.number_formats import FP8, HIFLOAT8, INT8
from mla_fusion.meta.spec import TILE_SIZE, TILED_ROW
from mla_fusion.operators.known import dtype_of, shape_of
from mla_fusion.prove import evaluate, field
from mla_fusion.prove.evaluate import Evaluation
from mla_fusion.prove.field import Num
from mla_fusion.prove.kernels import packed
from mla_fusion.prove.operators import real

_FARTHEST = 48  # nodes looked at on the way from the latent to the rows
_FORMATS = {form.element: form for form in (INT8, FP8, HIFLOAT8)}


@dataclass(frozen=True)
class Rows:
    """A value with a row for each token, and which element (token * width + column) each of its
    elements is.
    """

    node: Node
    codes: torch.Tensor
    width: int


@dataclass(frozen=True)
class PackedRows:
    """``node`` holds the rows that the kernel writes with ``k_nope_clip_alpha`` ``alpha``."""

    node: Node
    alpha: float


def find(
    view: View,
    latent: Rows,
    key: Rows,
    shrink: Shrink | None = None,
    element: torch.dtype = torch.int8,
) -> PackedRows | None:
    """The packed rows made of ``latent`` (c_kv) and ``key`` (k_pe), or None; ``element``: of a
    tile.
    """
    width = size_of(TILED_ROW, {"Hckv": latent.width, "Dr": key.width, "tile": TILE_SIZE})
    found = _rows_of_bytes(latent.node, width, element)
    if found is None or latent.width % TILE_SIZE:
        return None
    met = literals(nodes_between((latent.node, key.node), found))
    alphas = [1.0, *(value for value in met if 0 < value < 1)]
    alpha = evaluate.which(
        view,
        {latent.node: "x", key.node: "x"},
        alphas if element == torch.int8 else alphas[:1],
        lambda run, alpha: _holds(run, found, latent, key, alpha),
        shrink,
    )
    return None if alpha is None else PackedRows(found, alpha)


def _holds(run: Evaluation, found: Node, latent: Rows, key: Rows, alpha: float) -> bool:
    c_kv, k_pe = (_by_token(real(run.value(part.node)), part) for part in (latent, key))
    wanted = packed(c_kv, k_pe, _FORMATS[dtype_of(found)], TILE_SIZE, alpha)
    field.here().of_kernel += field.here().maxima  # under which a floor may stand
    value = real(run.value(found))
    return evaluate.is_same(value.reshape(wanted.shape), wanted)


def _by_token(value: Num, rows: Rows) -> Num:
    """[tokens, width]"""
    order = rows.codes.flatten().argsort()
    return value.moved(lambda part: part.flatten()[order].reshape(-1, rows.width))


def _rows_of_bytes(source: Node, width: int, element: torch.dtype) -> Node | None:
    """The first tensor of bytes of rows that wide which is made of ``source``, through the reshapes
    behind it.
    """
    for node in reached([source], users, _FARTHEST):
        if one_dtype(node) == element and same(shape_of(node)[-1], width):
            readers = list(node.users)
            while len(readers) == 1 and is_reshape(readers[0]):
                node, readers = readers[0], list(readers[0].users)
            return node
    return None
