"""``mf.audit`` of two functions that call no fused operator: proved equal, different, or not
decided.

Both are exported as one graph, which is run at random points of a finite field, where sums and
products are exact (:mod:`mla_fusion.exact`). Equal there is equal over the real numbers; rounding
is left out. Then float64 has to agree, and so have the functions as they run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from mla_fusion.compat import tree_leaves, tree_map_only
from mla_fusion.exact import field
from mla_fusion.exact.evaluate import Evaluation, order
from mla_fusion.fx.kinds import is_cast, is_float, is_random, value_of
from mla_fusion.fx.module_path import label, source
from mla_fusion.fx.sizes import Binding, is_symbolic
from mla_fusion.fx.walk import origin, reached, views_and_casts
from mla_fusion.graph import layout
from mla_fusion.graph.call import Pair
from mla_fusion.graph.form import Value
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.memory import Inputs, Target, error
from mla_fusion.tools.by_hand.outcome import Audit, Finding
from mla_fusion.tools.target import first_line
from mla_fusion.witness.side import Side, Unrunnable

_DIFFERENT = 1e-6  # relative; float64 is off by 1e-13 or so
_REFUTES = 1e-3  # of a proof: what float64 loses between equal spellings is less
_ROUNDED = 2e-2
# of the inputs: an epsilon shows, or a cap; what is taken a root of has either sign
_FACTORS = (1.0, -1.0, 1e-3, -1e-3, 1e3, -1e3, 0.0)


_Pair = tuple[Node, Node]


class _NotDecided(Exception):
    """Why, and the node that it is about."""

    def __init__(self, why: str, node: Node | None = None) -> None:
        super().__init__(why)
        self.node = node


class _Both(nn.Module):
    """Two functions, each on copies of the inputs: the tensors that each gives, and what it leaves
    in its inputs. forms: what the results of each look like.
    """

    def __init__(self, fused: Target, reference: Target, forms: list[str]) -> None:
        super().__init__()
        self.both, self.forms = (fused, reference), forms
        # named in the paths of modules; a method by its owner
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
        node = getattr(error, "node", None)
        line = source(node) if isinstance(node, Node) else ""
        text = f"not decided: {first_line(error)}"
        return Audit((), (Finding("not.decided", text, line=line, certain=False),))


def _verdict(fused: Target, reference: Target, eager: Mapping[str, float], inputs: Inputs) -> Audit:
    """``eager``: how far the two are apart as they run."""
    forms: list[str] = []  # none of the module's: what export changes there it puts back
    both = _Both(fused, reference, forms)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch, about itself
        program = torch.export.export(both, tuple(memory.copied(inputs)), strict=False)
        program = program.run_decompositions({})
    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    *nodes, output = program.graph_module.graph.nodes
    for node in nodes:
        _check_function(node)
    if forms[0] != forms[1]:
        text = f"one gives {forms[0]}; the other {forms[1]}"
        return Audit((), (Finding("results.differ", text),), False)
    inputs_of_graph = dict(zip(nodes, signature.input_specs, strict=False))
    weights = {
        node: tensors[spec.target].detach()
        for node, spec in inputs_of_graph.items()
        if spec.target is not None
    }
    placeholders = [node for node in inputs_of_graph if node not in weights]
    results: Any = output.args[0]
    half = len(results) // 2
    arguments = [*memory.named(inputs)]
    titles = [*(f"output {at}" for at in range(half - len(arguments))), *arguments]
    pairs = dict(zip(titles, zip(results[:half], results[half:], strict=True), strict=True))
    if signature.buffers_to_mutate or eager.keys() - pairs.keys():
        raise _NotDecided("a module is written; give what it writes as an argument instead")
    count = sum(value_of(node).numel() for node in results[half:])
    if not count:
        raise _NotDecided("no result has an element to compare")
    parting, line = "", ""
    marks = _marks_apart(program.graph_module, placeholders, weights, pairs.values())
    if marks:
        node = _parting(marks, pairs.values())
        parting, line = f"they part at {label(node)} ({node.target})", source(node)
    side = Side(results, {node: node for node in (*weights, *placeholders)})
    for factor in _FACTORS:
        witness = memory.scaled(inputs, factor)
        drawn = dict(zip(placeholders, tree_leaves(witness), strict=True)) | weights
        try:
            values = side.run(Binding(), drawn, True, results)
        except Unrunnable:
            continue
        errors = {name: error(values[other], values[one]) for name, (one, other) in pairs.items()}
        worst = max(errors.values())
        if worst == math.inf and (parting or abs(factor) > 1):  # an overflow
            continue
        first = next((name for name in errors if errors[name] > _DIFFERENT), "")
        draw = f"{factor:g} times the inputs"
        text = f"{first} differs by {worst:.2g} on {draw}"
        if not parting and worst > _REFUTES:
            raise _NotDecided(f"equal in exact arithmetic, but {text}")
        if parting and first:
            shown = Finding("values.differ", f"{text}; {parting}", line=line)
            return Audit((), (shown,), False, errors, None, (draw,), witness=tuple(witness))
    if parting:
        raise _NotDecided(f"neither proved equal nor seen to differ; {parting}", node)
    if not all(value <= _ROUNDED for value in eager.values()):
        raise _NotDecided("equal over the real numbers, but not as the two are run")
    return Audit(
        (), (), True, proof=f"{count:,} values at {len(field.POINTS)} points of a finite field"
    )


def _check_function(node: Node) -> None:
    """Raises NotDecided for what is no function of what it reads, or whose size values say."""
    parts = tree_leaves(value_of(node))
    sizes = [size for part in parts for size in getattr(part, "shape", [part])]
    integral = is_cast(node) and [
        not is_float(value_of(one).dtype)
        for one in (node, node.all_input_nodes[0], origin(node, views_and_casts))
    ]
    if is_random(node) or any(map(is_symbolic, sizes)) or integral == [True, False, True]:
        text = "is random, makes a size of values, or casts integers back that were rounded"
        raise _NotDecided(f"{node.name} ({node.target}) {text}", node)


def _marks_apart(
    gm: GraphModule,
    placeholders: Sequence[Node],
    weights: Mapping[Node, Tensor],
    pairs: Iterable[_Pair],
) -> dict[Node, object]:
    """A mark of what each node is at a random point of the field, at which a pair differs: equal
    nodes have equal marks. Empty where all pairs are equal at every point.
    """
    _unite_equal(weights)
    graph = _OfReals(gm, model_inputs=())
    for node, assumed in graph.assumed.items():
        raise _NotDecided(f"{node.name} ({node.target}) is read as if {assumed[0]}", node)
    values = {node: [*values_of(reading)] for node, reading in graph.readings.items()}
    wanted = [value for pair in pairs for node in pair for value in values[node]]
    for at in field.POINTS:
        drawn = {
            value: _by_numbers(weights[node], at)
            if node in weights
            else field.random(field.word(at.seed, "input", value.serial), value.shape)
            for node in (*weights, *placeholders)
            for value in values[node]
            if value.active
        }
        run = _at_a_point(wanted, drawn, at)
        marks: dict[Node, object] = {
            node: tuple(_mark(run, value) for value in parts)
            for node, parts in values.items()
            if parts
        }
        if any(marks[one] != marks[other] for one, other in pairs):
            return marks
    return {}


class _OfReals(Graph):
    """Floats are real numbers from the inputs on."""

    def _leaf(self, name: str, tensor: Tensor, model: bool) -> Any:
        found = super()._leaf(name, tensor, model)
        if isinstance(found, Pair):
            return found.each(lambda part: self.form.activation(part.literal, part.shape))
        return self.form.activation(name, found.shape) if found.is_float else found


def _at_a_point(
    wanted: Sequence[Value], drawn: Mapping[Value, Tensor], at: field.Point
) -> Evaluation:
    """A step that the field does not know is a function of all that it reads."""
    layouts = {value: layout.token_free_layout(value.shape) for value in drawn}
    run = Evaluation(layout.Binding((), 1), layouts, drawn, at)
    for value in order(wanted, drawn):
        try:
            layouts[value] = layout.layout_of(value, layouts)
            run.run([value])
        except layout.Mixed:
            layouts[value] = layout.token_free_layout(value.shape)
            read = [_mark(run, source) for source in value.sources]
            name = field.word(at.seed, value.op, value.literal, value.shape, value.dtype, *read)
            run.tensors[value] = field.random(name, value.shape)
    return run


def _unite_equal(weights: Mapping[Node, Tensor]) -> None:
    """Let weights with equal bits be one."""
    known: dict[object, Node] = {}
    for node, tensor in weights.items():
        first = known.setdefault((tensor.dtype, tensor.shape, _digest(tensor)), node)
        if first is not node:
            node.replace_all_uses_with(first)


def _mark(run: Evaluation, value: Value) -> object:
    """Equal for Values that are equal at the point."""
    tensor = run.tensors.get(value)
    return value.serial if tensor is None else (value.shape, _digest(tensor))


def _digest(tensor: Tensor) -> bytes:
    return blake2b(memory.bits(tensor).numpy().tobytes()).digest()


def _by_numbers(tensor: Tensor, at: field.Point) -> Tensor:
    """A weight's elements in the field: equal numbers are equal elements, wherever they lie."""
    if tensor.is_complex():
        raise _NotDecided("a weight is complex")
    bits = tensor.double().abs().contiguous().view(torch.int64)
    found = field.hashed(field.word(at.seed, "number"), bits & 0x7FFFFFFF, bits >> 31)
    return found * tensor.sign().to(torch.int64) % at.p


def _parting(marks: Mapping[Node, object], pairs: Iterable[_Pair]) -> Node:
    """The first step to results of one whose value is none on the way to those of the other."""
    sides = zip(*(pair for pair in pairs if marks[pair[0]] != marks[pair[1]]), strict=True)
    mine, theirs = ([*reached(side, lambda node: node.all_input_nodes)] for side in sides)
    known = {marks[node] for node in theirs if node in marks}
    new = (node for node in sorted(mine) if node in marks and marks[node] not in known)
    return next(new, mine[0])
