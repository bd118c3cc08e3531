"""Where the epsilon of a norm stands that is no RMSNorm as the kernel has it."""

from __future__ import annotations

from torch.fx import Node

from mla_fusion.fx.kinds import argument, word
from mla_fusion.fx.program import nodes_between

_ROOTS = ("rsqrt", "sqrt", "linalg_vector_norm", "norm")
_FLOORS = ("clamp_min", "clamp", "maximum")
_LARGEST = 1e-2  # of an epsilon
_KERNEL = "the kernel adds it under the root"


def misplaced(product: Node, latent: Node) -> tuple[str, tuple[Node, ...]]:
    """Of a latent made of a product: where an epsilon is added or taken as a floor, if not under
    the root, and the step; "" and no step where there is none.
    """
    steps = nodes_between((product,), latent)
    roots = [node for node in steps if word(node) in _ROOTS or _is_root(node)]
    for node in steps:
        name = word(node)
        number = _literal(node)
        if number is None:
            continue
        is_floor = name in _FLOORS
        if is_floor or (
            name == "add" and any(root in nodes_between((product,), node) for root in roots)
        ):
            does = (
                "takes epsilon {:g} as a floor"
                if is_floor
                else "adds epsilon {:g} outside the root"
            )
            return f"{node.name} ({node.target}) {does.format(number)}; {_KERNEL}", (node,)
    return "", ()


def is_named(detail: str) -> bool:
    """Does a message say where the epsilon is?"""
    return detail.endswith(_KERNEL)


def _is_root(node: Node) -> bool:
    return word(node) == "pow" and argument(node, "exponent") in (0.5, -0.5)


def _literal(node: Node) -> float | None:
    """The small positive number that a step adds, or does not go below."""
    given = argument(node, "other", argument(node, "min"))
    return float(given) if isinstance(given, (int, float)) and 0 < given <= _LARGEST else None
