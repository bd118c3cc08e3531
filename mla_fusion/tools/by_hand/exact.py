"""``mf.audit`` of two functions that call no fused operator: proves them equal, shows that they
differ, or does not decide.

It exports both as one graph, and runs the graph at random points of a finite field, where sums and
products are exact (:mod:`mla_fusion.exact`). Results that are equal there are equal over the real
numbers, without rounding. Then float64 has to agree, and the functions as they run.
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
from mla_fusion.exact.evaluate import Evaluation, computed_from
from mla_fusion.fx.kinds import dtype_of, is_cast, is_float, is_random, value_of
from mla_fusion.fx.module_path import label, source
from mla_fusion.fx.sizes import Binding, is_symbolic
from mla_fusion.fx.walk import origin, reached, views_and_casts
from mla_fusion.graph import layout
from mla_fusion.graph.call import Pair
from mla_fusion.graph.form import Value
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.report.text_tables import first_line
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.memory import Inputs, Target, relative_error
from mla_fusion.tools.by_hand.outcome import Audit, Finding
from mla_fusion.witness.compare import TOLERANCE
from mla_fusion.witness.side import Side, Unrunnable

_DIFFERENT = 1e-6  # relative; float64 is off by 1e-13 or so
_REFUTES = 1e-3  # of a proof; float64 loses less between equal spellings
# of the inputs: small ones show an epsilon, large ones a cap, and a radicand has either sign
_FACTORS = (1.0, -1.0, 1e-3, -1e-3, 1e3, -1e3, 0.0)


_Pair = tuple[Node, Node]


class _NotDecided(Exception):
    """Raised with the reason, and the node at fault."""

    def __init__(self, why: str, node: Node | None = None) -> None:
        super().__init__(why)
        self.node = node


class _Both(nn.Module):
    """Runs two functions, each on copies of the inputs, and returns their results and the copies.

    forms  receives a text of shapes and dtypes of the results of each
    """

    def __init__(self, fused: Target, reference: Target, forms: list[str]) -> None:
        super().__init__()
        self.targets, self.forms = (fused, reference), forms
        # paths of modules start with these names; the owner of a method is a module
        self.function, self.reference = (
            getattr(target, "__self__", target) for target in self.targets
        )

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Returns the tensors of the first function, then those of the second."""
        tensors = []
        for target in self.targets:
            copies = tree_map_only(Tensor, torch.clone, inputs)
            results = target(*copies)
            form = tree_map_only(Tensor, lambda value: (tuple(value.shape), value.dtype), results)
            self.forms.append(repr(form))
            tensors += memory.tensors_in((results, copies))
        return tensors


def compare(fused: Target, reference: Target, inputs: Inputs) -> Audit:
    """Returns the audit of two functions of which neither calls an operator of the contract."""
    try:
        reference_values = memory.values_of(reference, inputs)
        eager = memory.relative_errors(reference_values, memory.values_of(fused, inputs))
        with memory.restore(fused), memory.restore(reference):
            return _verdict(fused, reference, eager, inputs)
    except Exception as error:  # torch's export fails, or the field does not know a step
        node = getattr(error, "node", None)
        line = _line(node) if isinstance(node, Node) else ""
        cause = error if isinstance(error, _NotDecided) else first_line(error)
        finding = Finding("not.decided", f"not decided: {cause}", line=line, certain=False)
        return Audit((), (finding,))


def _verdict(fused: Target, reference: Target, eager: Mapping[str, float], inputs: Inputs) -> Audit:
    """Returns the audit of two functions. ``eager`` are the errors of the functions as they run."""
    forms: list[str] = []  # export would restore a list of the module's
    module = _Both(fused, reference, forms)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch, about itself
        program = torch.export.export(module, tuple(memory.copies_of(inputs)), strict=False)
        program = program.run_decompositions({})
    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    *nodes, output = program.graph_module.graph.nodes
    for node in nodes:
        _check_function(node)
    if forms[0] != forms[1]:
        text = f"one gives {forms[0]}; the other {forms[1]}"
        return Audit((), (Finding("results.differ", text),), False)
    weights, placeholders = dict[Node, Tensor](), list[Node]()
    for node, spec in zip(nodes, signature.input_specs, strict=False):
        if spec.target is None:
            placeholders.append(node)
        else:
            weights[node] = tensors[spec.target].detach()
    results = output.args[0]
    half = len(results) // 2
    arguments = memory.tensors_of_inputs(inputs)
    titles = [*(f"output {at}" for at in range(half - len(arguments))), *arguments]
    # a written module gives more results
    pairs = dict(zip(titles, zip(results[:half], results[half:], strict=False), strict=False))
    if signature.buffers_to_mutate or eager.keys() - pairs.keys():
        raise _NotDecided("a module is written; give what it writes as an argument instead")
    count = sum(value_of(node).numel() for node in results[half:])
    if not count:
        raise _NotDecided("no result has an element to compare")
    parting, line = "", ""
    marks = _differing_marks(program.graph_module, placeholders, weights, pairs.values())
    if marks:
        difference = _first_difference(marks, pairs.values())
        parting = f"they part at {label(difference)} ({difference.target})"
        line = _line(difference)
    side = Side(results, {node: node for node in (*weights, *placeholders)})
    for factor in _FACTORS:
        witness = memory.scale(inputs, factor)
        drawn = dict(zip(placeholders, tree_leaves(witness), strict=True)) | weights
        try:
            values = side.run(Binding(), drawn, True, results)
        except Unrunnable:
            continue
        errors = {
            name: relative_error(values[reference_node], values[node])
            for name, (node, reference_node) in pairs.items()
        }
        worst = max(errors.values())
        if worst == math.inf and (parting or abs(factor) > 1):  # an overflow
            continue
        first = next((name for name, error in errors.items() if error > _DIFFERENT), "")
        draw = f"{factor:g} times the inputs"
        text = f"{first} differs by {errors.get(first, worst):.2g} on {draw}"
        if not parting and worst > _REFUTES:
            raise _NotDecided(f"equal in exact arithmetic, but {text}")
        if parting and first:
            finding = Finding("values.differ", f"{text}; {parting}", line=line)
            return Audit((), (finding,), False, errors, None, (draw,), witness=tuple(witness))
    if parting:
        raise _NotDecided(f"neither proved equal nor seen to differ; {parting}", difference)
    if not all(error <= TOLERANCE for error in eager.values()):
        raise _NotDecided("equal over the real numbers, but not as the two are run")
    return Audit(
        (), (), True, proof=f"{count:,} values at {len(field.POINTS)} points of a finite field"
    )


def _line(node: Node) -> str:
    """Returns the user's line that made a node, or "": torch notes no lines outside modules."""
    line = source(node)
    return "" if line.startswith(__file__) else line


def _check_function(node: Node) -> None:
    """Raises _NotDecided for a node that is random, has a size that depends on values, or casts
    rounded integers back.
    """
    parts = tree_leaves(value_of(node))
    sizes = [size for part in parts for size in getattr(part, "shape", [part])]
    casts = (node, node.all_input_nodes[0], origin(node, views_and_casts)) if is_cast(node) else ()
    has_floats = [is_float(dtype_of(cast)) for cast in casts]
    if is_random(node) or any(map(is_symbolic, sizes)) or has_floats == [False, True, False]:
        text = "is random, makes a size of values, or casts integers back that were rounded"
        raise _NotDecided(f"{node.name} ({node.target}) {text}", node)


def _differing_marks(
    gm: GraphModule,
    placeholders: Sequence[Node],
    weights: Mapping[Node, Tensor],
    pairs: Iterable[_Pair],
) -> dict[Node, object]:
    """Returns a mark of each node at a random point of the field at which a pair differs: equal
    nodes have equal marks. Returns nothing if all pairs are equal at every point.
    """
    _unite_equal_weights(weights)
    graph = _OfReals(gm, model_inputs=())
    for node, assumed in graph.assumed.items():
        raise _NotDecided(f"{node.name} ({node.target}) is read as if {assumed[0]}", node)
    values = {node: [*values_of(reading)] for node, reading in graph.readings.items()}
    results = [value for pair in pairs for node in pair for value in values[node]]
    for at in field.POINTS:
        drawn = {
            value: _elements_of(weights[node], at)
            if node in weights
            else field.random(field.word(at.seed, "input", value.serial), value.shape)
            for node in (*weights, *placeholders)
            for value in values[node]
            if value.active
        }
        run = _evaluate(results, drawn, at)
        marks: dict[Node, object] = {
            node: tuple(_mark(run, value) for value in parts)
            for node, parts in values.items()
            if parts
        }
        if any(marks[node] != marks[reference_node] for node, reference_node in pairs):
            return marks
    return {}


class _OfReals(Graph):
    """A graph in which the floats of all inputs are real numbers."""

    def _leaf(self, name: str, tensor: Tensor, model: bool) -> Any:
        """Returns the Value of an input: a float is an activation."""
        reading = super()._leaf(name, tensor, model)
        if isinstance(reading, Pair):
            return reading.each(lambda part: self.form.activation(part.literal, part.shape))
        return self.form.activation(name, reading.shape) if reading.is_float else reading


def _evaluate(
    results: Sequence[Value], drawn: Mapping[Value, Tensor], at: field.Point
) -> Evaluation:
    """Evaluates the results at a point. A step that the field does not know is a random function of
    all that it reads.
    """
    layouts = {value: layout.token_free_layout(value.shape) for value in drawn}
    run = Evaluation(layout.Binding((), 1), layouts, drawn, at)
    for value in computed_from(results, drawn):
        try:
            layouts[value] = layout.layout_of(value, layouts)
            run.run([value])
        except layout.Mixed:
            layouts[value] = layout.token_free_layout(value.shape)
            read = [_mark(run, source) for source in value.sources]
            name = field.word(at.seed, value.op, value.literal, value.shape, value.dtype, *read)
            run.tensors[value] = field.random(name, value.shape)
    return run


def _unite_equal_weights(weights: Mapping[Node, Tensor]) -> None:
    """Replaces each weight by the first weight with the same bits."""
    known: dict[object, Node] = {}
    for node, tensor in weights.items():
        first = known.setdefault((tensor.dtype, tensor.shape, _digest(tensor)), node)
        if first is not node:
            node.replace_all_uses_with(first)


def _mark(run: Evaluation, value: Value) -> object:
    """Returns a mark that Values share if they are equal at the point."""
    tensor = run.tensors.get(value)
    return value.serial if tensor is None else (value.shape, _digest(tensor))


def _digest(tensor: Tensor) -> bytes:
    """Returns a hash of the bits of a tensor."""
    return blake2b(memory.bits(tensor).numpy().tobytes()).digest()


def _elements_of(tensor: Tensor, at: field.Point) -> Tensor:
    """Returns the elements of a weight in the field: equal numbers are equal elements."""
    if tensor.is_complex():
        raise _NotDecided("a weight is complex")
    bits = tensor.double().abs().contiguous().view(torch.int64)
    elements = field.hashed(field.word(at.seed, "number"), bits & 0x7FFFFFFF, bits >> 31)
    return elements * tensor.sign().to(torch.int64) % at.p


def _first_difference(marks: Mapping[Node, object], pairs: Iterable[_Pair]) -> Node:
    """Returns the first step of the fused function whose value the reference does not compute."""
    sides = zip(*(pair for pair in pairs if marks[pair[0]] != marks[pair[1]]), strict=True)
    steps, other_steps = ([*reached(side, lambda node: node.all_input_nodes)] for side in sides)
    known = {marks[node] for node in other_steps if node in marks}
    new = (node for node in sorted(steps) if node in marks and marks[node] not in known)
    return next(new, steps[0])
