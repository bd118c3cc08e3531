"""``mf.audit`` of two functions that call no fused operator: proved equal, different, or not
decided.

Both are exported as one graph, which is run at random points of a finite field, where sums and
products are exact (:mod:`mla_fusion.prove`). Equal there is equal over the real numbers; rounding
is left out. Then float64 has to agree, and each function with its graph.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
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
from mla_fusion.prove.field import Complex, Num, Point, Undecided, Value
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.memory import Inputs, Target, Values, error
from mla_fusion.tools.by_hand.outcome import Audit, Finding

_DIFFERENT = 1e-6  # relative; float64 is off by 1e-13 or so
_REFUTES = 1e-3  # of a proof: what float64 loses between equal spellings is less
_ROUNDED = 2e-2  # of a function, compared with its graph
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
    forms: list[str] = []
    runs = [memory.values_of(target, inputs) for target in (fused, reference)]
    try:
        with memory.kept(fused), memory.kept(reference), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch, about itself
            both, given = _Both(fused, reference, forms), tuple(memory.copied(inputs))
            graph = _Graph(torch.export.export(both, given, strict=False).run_decompositions({}))
        if any(run.rebound for run in runs):
            raise Undecided("a run binds another tensor to a name of a module")
        if forms[0] != forms[1]:
            said = f"one gives {forms[0]}; the other {forms[1]}"
            return Audit((), (Finding("results.differ", said),), False)
        return _verdict(graph, runs, inputs)
    except Exception as error:  # of torch's export, or of a step that the field does not know
        said, node = (*error.args, "", None)[:2]
        said = f"not decided: {type(error).__name__}: {str(said).partition(chr(10))[0]}"
        line = source(node) if isinstance(error, Unproved) else ""
        return Audit((), (Finding("not.decided", said, line=line, certain=False),))


class _Graph:
    """Two functions as one graph that writes nothing.

    held     by placeholder: the parameter, buffer or constant
    given    the placeholders of the inputs
    results  of each function
    """

    def __init__(self, program: ExportedProgram) -> None:
        signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
            raise Undecided("a buffer is written; give it as an argument instead")
        self.view = View(program.graph_module)
        *self.nodes, output = self.view.nodes
        names = [spec.target for spec in signature.input_specs if spec.target is not None]
        held = zip(self.nodes, names, strict=False)
        self.held = {node: tensors[name].detach() for node, name in held}
        self.given = self.nodes[len(names) : len(signature.input_specs)]
        results: Any = output.args[0]
        self.results = results[: len(results) // 2], results[len(results) // 2 :]
        for node in self.nodes:
            _check_function(node)

    def compared(self) -> tuple[list[Node], int]:
        """The first step of each at which the two part, and how many values are equal."""
        roles = {node: "x" for node in self.given if is_float(value_of(node).dtype)}
        count, (mine, theirs) = 0, self.results
        for draw in range(POINTS):
            run = _AtPoint(self.view, dict.fromkeys(self.given, "") | roles)
            run.held = self.held
            with field.at(Point(draw, are_rows=False, float16=False)):
                pairs = zip(mine, theirs, strict=True)
                apart = [pair for pair in pairs if not is_same(*map(run.value, pair))]
                if apart:
                    one, other = ([pair[side] for pair in apart] for side in (0, 1))
                    return [*_parting(run, one, other), *_parting(run, other, one)], 0
            count += sum(value_of(node).numel() for node in theirs)
        return [], count

    def in_float64(self, inputs: Inputs) -> list[list[Tensor]]:
        """The results of each. Raises Unrunnable."""
        given = dict(zip(self.given, tree_leaves(inputs), strict=True)) | self.held
        runner = Interpreter(self.nodes, self.view.binding, wide=True)
        wanted = [node for side in self.results for node in side]
        env = runner.run({node: widened(value) for node, value in given.items()}, wanted)
        return [[env[node] for node in side] for side in self.results]


def _verdict(graph: _Graph, runs: Sequence[Values], inputs: Inputs) -> Audit:
    parts, count = graph.compared()
    if not parts and not count:
        raise Undecided("no result has an element to compare")
    names = [name for name in runs[0].after if name[:6] == "output"] + [*memory.named(inputs)]
    at = " and ".join(f"{label(node)} ({node.target})" for node in parts)
    for factor in _FACTORS:
        draw = memory.scaled(inputs, factor)
        try:
            mine, theirs = graph.in_float64(draw)
        except Unrunnable:
            continue
        for run, side in zip(runs, (mine, theirs), strict=True):
            pairs = zip(names, side, strict=True)
            if factor == 1 and not all(
                error(one, run.after[name]) <= _ROUNDED for name, one in pairs
            ):
                raise Undecided("a function gives another result than the graph exported from it")
        errors = dict(zip(names, map(error, theirs, mine), strict=True))
        worst, on = max(errors.values()), f"{factor:g} times the inputs"
        if worst == math.inf and (parts or abs(factor) > 1):  # an overflow
            continue
        first = next((name for name in names if errors[name] > _DIFFERENT), "")
        said = f"{first} differs by {worst:.2g} on {on}"
        if not parts and worst > _REFUTES:
            raise Undecided(f"equal in exact arithmetic, but {said}")
        if parts and first:
            found = Finding("values.differ", f"{said}; they part at {at}", line=source(parts[0]))
            return Audit((), (found,), False, errors, None, (on,), witness=tuple(draw))
    if parts:
        raise Unproved(f"neither proved equal nor seen to differ; they part at {at}", parts[0])
    return Audit((), (), True, proof=f"{count:,} values at {POINTS} points of a finite field")


def _check_function(node: Node) -> None:
    """Raises Undecided for what is no function of what it reads, or whose size values say."""
    parts = tree_leaves(value_of(node))
    sizes = [
        size for part in parts for size in (part.shape if isinstance(part, Tensor) else [part])
    ]
    whole = is_cast(node) and [
        not is_float(value_of(one).dtype)
        for one in (node, node.args[0], origin(node, views_and_casts))
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


def _parting(run: Evaluation, mine: Sequence[Node], theirs: Sequence[Node]) -> list[Node]:
    """The first step to results of one whose value is none on the way to those of the other."""

    def marked(results: Sequence[Node]) -> dict[Node, object]:
        nodes = reached(results, lambda node: node.all_input_nodes)
        return {node: _mark(run.value(node)) for node in nodes}

    known, steps = marked(theirs).values(), marked(mine)
    return [node for node in run.view.nodes if node in steps and steps[node] not in known][:1]


def _mark(value: Any) -> object:
    """Equal for equal values of one shape."""
    if isinstance(value, Complex):
        value = value.real, value.imag
    if isinstance(value, (list, tuple)):
        return [*map(_mark, value)]
    return int(field.label(value).re) if isinstance(value, Num) else value
