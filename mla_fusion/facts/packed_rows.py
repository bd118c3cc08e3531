"""Rows of a per-tile quantised cache (kv_cache_quant_mode 3): ``int8 c_kv | bfloat16 k_pe | float32
scales``; in a float format of A5 its numbers in the place of int8.

Read off by running the nodes between the latent, the key and the int8 rows as they are, dtypes and
all, on numbers that bfloat16 holds: then the key's bytes must come out bit for bit, every scale be
``alpha * max|tile| / 127`` and every int8 the nearest number of steps. Another order of the parts,
another tile or a truncation is another function. In a float format npu_dynamic_block_quant alone
may quantise, and everything else moves bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.quantising import only_quantises
from mla_fusion.fx.kinds import (
    Kind,
    argument,
    is_cast,
    is_faithful_cast,
    is_reshape,
    kind_of,
    op_name,
)
from mla_fusion.fx.measured import measured
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import is_symbolic, same
from mla_fusion.fx.view import View
from mla_fusion.meta.number_formats import of_dst_type
from mla_fusion.meta.spec import DERIVED, TILE_SIZE
from mla_fusion.paging.tiles import unpack_rows
from mla_fusion.reference.formats import FP8, HIFLOAT8

_FARTHEST = 48  # nodes looked at on the way from the latent to the rows


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


@measured
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
    width = DERIVED["Dtile"]({"Hckv": latent.width, "Dr": key.width, "tile": TILE_SIZE})
    packed = _rows_of_bytes(latent.node, width, element)
    if packed is None or latent.width % TILE_SIZE:
        return None
    between = nodes_between((latent.node, key.node), packed)
    by_operator = [node for node in between if op_name(node) == "npu::npu_dynamic_block_quant"]
    if not all(_quantises_tiles(node, element) for node in by_operator):
        return None
    others = [node for node in between if node not in by_operator and not _moves(node)]
    inside = {latent.node, key.node, *between}
    choices = [node for node in others if not _bounds_by_rows(node, inside)]
    if (others and element != torch.int8) or not only_quantises(view, choices):
        return None
    program = Program([latent.node, key.node], between, view.binding, exact=True, shrink=shrink)
    generator = torch.Generator().manual_seed(0)
    tokens = latent.codes.numel() // latent.width
    c_kv, k_pe = (
        torch.randn(tokens, part.width, generator=generator, dtype=torch.float32).bfloat16()
        for part in (latent, key)
    )
    found = program.run([_arranged(c_kv, latent), _arranged(k_pe, key)])[program.slot(packed)]
    if not isinstance(found, torch.Tensor) or found.numel() != tokens * width:
        return None
    rows = found.reshape(tokens, width).contiguous()
    if element != torch.int8:
        return PackedRows(packed, 1.0) if _is_packed(rows, c_kv, k_pe) else None
    alpha = _clip(rows, c_kv, k_pe)
    return PackedRows(packed, alpha) if alpha is not None else None


def _moves(node: Node) -> bool:
    """Bytes, whatever they are read as."""
    if op_name(node) == "aten::view":  # view.dtype among them
        return True
    return kind_of(node) is Kind.MOVEMENT and (not is_cast(node) or is_faithful_cast(node))


def _bounds_by_rows(node: Node, inside: Collection[Node]) -> bool:
    """Is it a clip whose bounds are made of the rows alone, as ``alpha * max|tile|`` is? Which, the
    numbers say.
    """
    literal = any(isinstance(argument(node, name), (int, float)) for name in ("min", "max"))
    clips = op_name(node) in ("aten::clamp", "aten::minimum", "aten::maximum") and not literal
    return clips and all(read in inside for read in node.all_input_nodes)


def _quantises_tiles(node: Node, element: torch.dtype) -> bool:
    """Does npu_dynamic_block_quant make tiles of ``element`` as the kernel does, also of rows that
    no probe has?
    """
    made = of_dst_type(argument(node, "dst_type", 1))
    if (
        made is None
        or made.element != element
        or argument(node, "round_mode", "rint") != made.block_rounding
    ):
        return False
    wanted = {
        "row_block_size": 1,
        "col_block_size": TILE_SIZE,
        "min_scale": 0.0,
        "dst_type_max": 0.0,
    }
    return all(argument(node, name) in (None, value) for name, value in wanted.items())


def _is_packed(rows: torch.Tensor, c_kv: torch.Tensor, k_pe: torch.Tensor) -> bool:
    kernel = HIFLOAT8 if rows.dtype == torch.uint8 else FP8
    values, bits, scale = unpack_rows(rows, hckv=c_kv.shape[-1], dr=k_pe.shape[-1], tile=TILE_SIZE)
    wanted, of_tiles = kernel.per_tile(c_kv.float(), None, TILE_SIZE)
    same = torch.equal(values.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(
        scale, of_tiles
    )
    return same and torch.equal(bits.view(torch.int16), k_pe.view(torch.int16))


def _rows_of_bytes(source: Node, width: int, element: torch.dtype) -> Node | None:
    """The first tensor of bytes of rows that wide which is made of ``source``, through the reshapes
    behind it.
    """
    nodes = [source]
    for node in nodes:  # grows as it is walked
        value = node.meta.get("val")
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == element
            and same(value.shape[-1], width)
        ):
            readers = list(node.users)
            while len(readers) == 1 and is_reshape(readers[0]):
                node, readers = readers[0], list(readers[0].users)
            return node
        if len(nodes) < _FARTHEST:
            nodes += [
                user
                for user in node.users
                if user not in nodes and not is_symbolic(user.meta.get("val"))
            ]
    return None


def _arranged(rows: torch.Tensor, as_in: Rows) -> torch.Tensor:
    value = as_in.node.meta["val"]
    return rows.flatten()[as_in.codes.flatten().long()].reshape(as_in.codes.shape).to(value.dtype)


def _clip(rows: torch.Tensor, c_kv: torch.Tensor, k_pe: torch.Tensor) -> float | None:
    """The alpha of rows that are ``c_kv`` and ``k_pe`` packed as the kernel packs them, or None."""
    values, bits, scale = unpack_rows(rows, hckv=c_kv.shape[-1], dr=k_pe.shape[-1], tile=TILE_SIZE)
    tiles = c_kv.double().unflatten(-1, (-1, TILE_SIZE))
    largest = tiles.abs().amax(-1)
    alpha = float((scale.double() * 127 / largest).median())
    if not 0 < alpha < 1 + 1e-6 or not torch.equal(bits.view(torch.int16), k_pe.view(torch.int16)):
        return None
    alpha = 1.0 if abs(alpha - 1) < 1e-6 else round(alpha, 6)
    limit = (alpha * largest).unsqueeze(-1)
    steps = tiles.clamp(-limit, limit) / (limit / 127)
    nearest = (values.double().unflatten(-1, (-1, TILE_SIZE)) - steps).abs() <= 0.5 + 1e-4
    exact = (scale.double() * 127 - alpha * largest).abs() <= 1e-5 * largest
    return alpha if bool(nearest.all()) and bool(exact.all()) else None
