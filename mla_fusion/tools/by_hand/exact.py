"""``mf.audit`` of two functions that call no fused operator: proved equal, different, or not
decided.

Both are exported as one graph, which is run at random points of a finite field, where sums and
products are exact (:mod:`mla_fusion.prove`). Equal there is equal over the real numbers; rounding
is left out. Then float64 has to agree, and so have the functions as they run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from mla_fusion.commit.interpreter import Interpreter, Unrunnable, widened
from mla_fusion.compat import tree_leaves, tree_map_only
from mla_fusion.fx.kinds import is_cast, is_float, kind_of
from mla_fusion.fx.module_path import label, source
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, reached, views_and_casts
from mla_fusion.operators.known import Kind, value_of
from mla_fusion.prove import field
from mla_fusion.prove.evaluate import POINTS, Evaluation, Unproved, is_same
from mla_fusion.prove.field import Num, Point, Undecided, Value
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.memory import Inputs, Target, error
from mla_fusion.tools.by_hand.outcome import Audit, Finding

_DIFFERENT = 1e-6  # relative; float64 is off by 1e-13 or so
_REFUTES = 1e-3  # of a proof: what float64 loses between equal spellings is less
_ROUNDED = 2e-2
# of the inputs: an epsilon shows, or a cap; what is taken a root of has either sign
_FACTORS = (1.0, -1.0, 1e-3, -1e-3, 1e3, -1e3, 0.0)


class _Both(nn.Module):
    """Two functions, each on copies of the inputs: the tensors that each gives, and what it leaves
    in its inputs. forms: what the results of each look like.
    """

    def __init__(self, fused: Target, reference: Target, forms: list[str]) -> None:
        super().__init__()
        self.both, self.forms = (fused, reference), forms
        # named in the paths of modules; found there, a method's owner too
        self.function, self.reference = (getattr(one, "__self__", one) for one in self.both)

    def forward(self, *inputs: Any) -> list[Tensor]:
        found = []
        for target in self.both:
            given = tree_map_only(Tensor, torch.clone, inputs)
            made = target(*given)
            form = tree_map_only(Tensor, lambda value: (tuple(value.shape), value.dtype), made)
            self.forms.append(repr(form))
            found += memory.tensors_in((made, given))
        return found


def compare(fused: Target, reference: Target, inputs: Inputs) -> Audit:
    """Neither calls an operator of the contract."""
    try:
        runs = [memory.values_of(target, inputs) for target in (fused, reference)]
        eager = memory.errors(runs[1], runs[0])
        with memory.kept(fused), memory.kept(reference):
            return _verdict(fused, reference, eager, inputs)
    except Exception as error:  # of torch's export, or of a step that the field does not know
        said, node = (*error.args, "", None)[:2]
        said = f"not decided: {type(error).__name__}: {str(said).partition(chr(10))[0]}"
        line = source(node) if isinstance(error, Unproved) else ""
        return Audit((), (Finding("not.decided", said, line=line, certain=False),))


def _verdict(fused: Target, reference: Target, eager: Mapping[str, float], inputs: Inputs) -> Audit:
    """``eager``: how far the two are apart as they run."""
    forms: list[str] = []  # none of the module's: what export changes there it puts back
    both = _Both(fused, reference, forms)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch, about itself
        program = torch.export.export(both, tuple(memory.copied(inputs)), strict=False)
        program = program.run_decompositions({})
    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    view = View(program.graph_module)
    *nodes, output = view.nodes
    for node in nodes:
        _check_function(node)
    if forms[0] != forms[1]:
        said = f"one gives {forms[0]}; the other {forms[1]}"
        return Audit((), (Finding("results.differ", said),), False)
    names = [spec.target for spec in signature.input_specs if spec.target is not None]
    held = {node: tensors[name].detach() for node, name in zip(nodes, names, strict=False)}
    given = nodes[len(names) : len(signature.input_specs)]
    results: Any = output.args[0]
    half = len(results) // 2
    pairs = [*zip(results[:half], results[half:], strict=True)]
    arguments = [*memory.named(inputs)]
    results_of = [*(f"output {at}" for at in range(half - len(arguments))), *arguments]
    if signature.buffers_to_mutate or eager.keys() - {*results_of}:
        raise Undecided("a module is written; give what it writes as an argument instead")
    count = sum(value_of(node).numel() for node in results[half:])
    if not count:
        raise Undecided("no result has an element to compare")
    at, line = "", ""
    for draw in range(POINTS):
        run = _AtPoint(view, {one: "x" if is_float(value_of(one).dtype) else "" for one in given})
        run.held = held
        with field.at(Point(draw, are_rows=False, float16=False)):
            apart = [pair for pair in pairs if not is_same(*map(run.value, pair))]
            if apart:
                node = _parting(run, *([pair[side] for pair in apart] for side in (0, 1)))
                at, line = f"they part at {label(node)} ({node.target})", source(node)
                break
    runner = Interpreter(nodes, view.binding, wide=True)
    for factor in _FACTORS:
        draw_of = memory.scaled(inputs, factor)
        known = dict(zip(given, tree_leaves(draw_of), strict=True)) | held
        try:
            env = runner.run({one: widened(value) for one, value in known.items()}, results)
        except Unrunnable:
            continue
        found = [error(env[theirs], env[mine]) for mine, theirs in pairs]
        errors, on = dict(zip(results_of, found, strict=True)), f"{factor:g} times the inputs"
        worst = max(found)
        if worst == math.inf and (at or abs(factor) > 1):  # an overflow
            continue
        first = next((name for name in errors if errors[name] > _DIFFERENT), "")
        said = f"{first} differs by {worst:.2g} on {on}"
        if not at and worst > _REFUTES:
            raise Undecided(f"equal in exact arithmetic, but {said}")
        if at and first:
            shown = Finding("values.differ", f"{said}; {at}", line=line)
            return Audit((), (shown,), False, errors, None, (on,), witness=tuple(draw_of))
    if at:
        raise Unproved(f"neither proved equal nor seen to differ; {at}", node)
    if not all(value <= _ROUNDED for value in eager.values()):
        raise Undecided("equal over the real numbers, but not as the two are run")
    return Audit((), (), True, proof=f"{count:,} values at {POINTS} points of a finite field")


def _check_function(node: Node) -> None:
    """Raises Undecided for what is no function of what it reads, or whose size values say."""
    parts = tree_leaves(value_of(node))
    sizes = [
        size for part in parts for size in (part.shape if isinstance(part, Tensor) else [part])
    ]
    whole = is_cast(node) and [
        not is_float(value_of(one).dtype)
        for one in (node, node.all_input_nodes[0], origin(node, views_and_casts))
    ]
    if (
        kind_of(node) is Kind.RANDOM
        or any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)
        or whole == [True, False, True]
    ):
        said = "is random, makes a size of values, or casts integers back that were rounded"
        raise Unproved(f"{node.name} ({node.target}) {said}", node)


class _AtPoint(Evaluation):
    """A weight is known by its numbers: so are copies, joins and transposes of it."""

    held: dict[Node, Tensor]

    def _leaf(self, node: Node, role: str) -> Any:
        tensor = self.held.get(node)
        return super()._leaf(node, role) if tensor is None else _by_numbers(tensor)


def _by_numbers(tensor: Tensor) -> Value:
    """Equal numbers are equal elements, wherever they lie."""
    if tensor.is_complex():
        raise Undecided("a weight is complex")
    if not tensor.is_floating_point() or (tensor.numel() == 1 and bool(tensor.isfinite())):
        return field.exact(tensor)
    bits = tensor.double().abs().contiguous().view(torch.int64)
    root = field.function("number", Num(bits & 0x7FFFFFFF), Num(bits >> 31))
    # a square, and its negative is none: so the root of a square is its size
    return root * root * Num(tensor.sign().to(torch.int64).remainder(field.P))


def _parting(run: Evaluation, mine: Sequence[Node], theirs: Sequence[Node]) -> Node:
    """The first step to results of one whose value is none on the way to those of the other."""

    def marked(results: Sequence[Node]) -> dict[Node, int]:
        nodes = reached(results, lambda node: node.all_input_nodes)
        values = ((node, run.value(node)) for node in nodes)
        return {node: int(field.label(v).re) for node, v in values if isinstance(v, Num)}

    known, steps = {*marked(theirs).values()}, marked(mine)
    new = (node for node in run.view.nodes if node in steps and steps[node] not in known)
    return next(new, mine[0])
