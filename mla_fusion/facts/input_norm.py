"""RMSNorm of the hidden state itself: ``normed = gamma * h / sqrt(mean(h^2) + 1e-6)``, whatever
operators say it.

No product stands before it, so there is no cone: the nodes between h and its norm are held against
the norm's definition in exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import is_getitem, one_dtype, word
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import has_symbols, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached
from mla_fusion.meta.preprocess import EPSILON
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.prove import evaluate
from mla_fusion.prove.evaluate import Evaluation
from mla_fusion.prove.operators import real, rms_norm

_FARTHEST = 16


@dataclass(frozen=True, kw_only=True)
class InputNorm:
    """``normed`` is the norm of ``hidden``, which has as many axes, by ``gamma``, [H].

    begins   what both are computed from: ``hidden``, or the two that one operator adds up and norms
    """

    hidden: Node
    normed: Node
    gamma: Node
    begins: tuple[Node, ...]


def find(view: View, normed: Node) -> InputNorm | None:
    """The norm whose result ``normed`` is; the hidden state is the nearest bfloat16 value of which
    that is shown.
    """
    shape = shape_of(normed)
    if has_symbols(shape):
        return None
    by_addition = _of_sum(normed)
    if by_addition is not None:
        return by_addition

    def holds_tensors(node: Node) -> bool:
        return isinstance(value_of(node), (torch.Tensor, tuple, list))

    def may_be_x(node: Node) -> bool:
        return one_dtype(node) == torch.bfloat16 and same_shape(shape_of(node), shape)

    _, *above = reached(
        [normed], lambda node: filter(holds_tensors, node.all_input_nodes), _FARTHEST
    )
    found = (_check(view, read, normed) for read in above if may_be_x(read))
    return next((fact for fact in found if fact is not None), None)


def _of_sum(normed: Node) -> InputNorm | None:
    """npu_add_rms_norm: the sum that it norms is its third result."""
    operator = normed.args[0] if is_getitem(normed) and normed.args[1] == 0 else None
    if not isinstance(operator, Node) or word(operator) != "npu_add_rms_norm":
        return None
    total = next((user for user in operator.users if is_getitem(user) and user.args[1] == 2), None)
    epsilon = (
        operator.args[3] if len(operator.args) > 3 else operator.kwargs.get("epsilon", EPSILON)
    )
    gamma = operator.args[2]
    if (
        total is None
        or not isinstance(gamma, Node)
        or not isinstance(epsilon, float)
        or epsilon != EPSILON
    ):
        return None
    return InputNorm(
        hidden=total, normed=normed, gamma=gamma, begins=tuple(operator.all_input_nodes[:2])
    )


def _check(view: View, hidden: Node, normed: Node) -> InputNorm | None:
    leaves = [node for node in nodes_between((hidden,), normed) if not node.all_input_nodes]
    if len(leaves) != 1:
        return None
    (gamma,) = leaves
    if not same_shape(shape_of(gamma), shape_of(hidden)[-1:]):
        return None

    def is_norm(run: Evaluation) -> bool:
        value, weight = (real(run.value(node)) for node in (hidden, gamma))
        wanted = rms_norm(value, weight, EPSILON, 1)[0]  # first: its roots are known then
        return evaluate.is_same(run.value(normed), wanted)

    found = InputNorm(hidden=hidden, normed=normed, gamma=gamma, begins=(hidden,))
    return found if evaluate.holds(view, {hidden: "x", gamma: "gamma"}, is_norm) else None
