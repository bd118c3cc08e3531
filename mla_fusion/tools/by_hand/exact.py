"""``mf.audit`` of two functions that call no fused operator: proved equal, different, or not
decided.

Both are exported as one graph, which is run at random points of a finite field, where sums and
products are exact (:mod:`mla_fusion.exact`). Equal there is equal over the real numbers; rounding
is left out. Then float64 has to agree, and so have the functions as they run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
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
from mla_fusion.fx.sizes import Binding
from mla_fusion.fx.walk import origin, reached, views_and_casts
from mla_fusion.graph import layout
from mla_fusion.graph.call import Pair
from mla_fusion.graph.form import Value
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.memory import Inputs, Target, error
from mla_fusion.tools.by_hand.outcome import Audit, Finding
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
        said = f"not decided: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        node = error.node if isinstance(error, _NotDecided) else None
        line = source(node) if node is not None else ""
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
    *nodes, output = program.graph_module.graph.nodes
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
        raise _NotDecided("a module is written; give what it writes as an argument instead")
    count = sum(value_of(node).numel() for node in results[half:])
    if not count:
        raise _NotDecided("no result has an element to compare")
    at, line = "", ""
    run = _differing(program.graph_module, given, held, pairs)
    if run is not None:
        apart, marks = run
        node = _parting(marks, *([pair[side] for pair in apart] for side in (0, 1)))
        at, line = f"they part at {label(node)} ({node.target})", source(node)
    wanted = dict.fromkeys(results)
    side = Side(wanted, {node: node for node in (*held, *given)})
    for factor in _FACTORS:
        draw_of = memory.scaled(inputs, factor)
        known = dict(zip(given, tree_leaves(draw_of), strict=True)) | held
        try:
            env = side.run(Binding(), known, True, wanted)
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
            raise _NotDecided(f"equal in exact arithmetic, but {said}")
        if at and first:
            shown = Finding("values.differ", f"{said}; {at}", line=line)
            return Audit((), (shown,), False, errors, None, (on,), witness=tuple(draw_of))
    if at:
        raise _NotDecided(f"neither proved equal nor seen to differ; {at}", node)
    if not all(value <= _ROUNDED for value in eager.values()):
        raise _NotDecided("equal over the real numbers, but not as the two are run")
    return Audit(
        (), (), True, proof=f"{count:,} values at {len(field.POINTS)} points of a finite field"
    )


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
        is_random(node)
        or any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)
        or whole == [True, False, True]
    ):
        said = "is random, makes a size of values, or casts integers back that were rounded"
        raise _NotDecided(f"{node.name} ({node.target}) {said}", node)


def _differing(
    gm: GraphModule, given: Sequence[Node], held: Mapping[Node, Tensor], pairs: Sequence[_Pair]
) -> tuple[list[_Pair], dict[Node, object]] | None:
    """The pairs that are not equal at a random point of the field, with a mark of what each node is
    there: equal ones have equal marks. None: all are equal at every point.
    """
    _read_once(held)
    graph = _OfReals(gm, model_inputs=())
    for node, assumed in graph.assumed.items():
        raise _NotDecided(f"{node.name} ({node.target}) is read as if {assumed[0]}", node)
    wanted = [*values_of([graph.readings[node] for pair in pairs for node in pair])]
    leaves = {node: [*values_of(graph.readings[node])] for node in (*held, *given)}
    for at in field.POINTS:
        drawn = {
            value: _by_numbers(held[node], at)
            if node in held
            else field.random(field.word(at.seed, "input", value.serial), value.shape)
            for node, values in leaves.items()
            for value in values
            if value.active
        }
        run = _at_a_point(wanted, drawn, at)
        marks = {
            node: tuple(_mark(run, value) for value in values_of(reading))
            for node, reading in graph.readings.items()
        }
        apart = [(one, other) for one, other in pairs if marks[one] != marks[other]]
        if apart:
            return apart, {node: some for node, some in marks.items() if some}
    return None


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


def _read_once(held: Mapping[Node, Tensor]) -> None:
    """Let weights with equal numbers be one."""
    first: list[Node] = []
    for node, tensor in held.items():
        alike = (one for one in first if held[one].dtype == tensor.dtype)
        same = next((one for one in alike if torch.equal(held[one], tensor)), None)
        if same is None:
            first.append(node)
        else:
            node.replace_all_uses_with(same)


def _mark(run: Evaluation, value: Value) -> object:
    """Equal for Values that are equal at the point."""
    tensor = run.tensors.get(value)
    if tensor is None:
        return value.serial
    return value.shape, blake2b(tensor.contiguous().numpy().tobytes()).hexdigest()


def _by_numbers(tensor: Tensor, at: field.Point) -> Tensor:
    """A weight's elements in the field: equal numbers are equal elements, wherever they lie."""
    if tensor.is_complex():
        raise _NotDecided("a weight is complex")
    bits = tensor.double().abs().contiguous().view(torch.int64)
    found = field.hashed(field.word(at.seed, "number"), bits & 0x7FFFFFFF, bits >> 31)
    return found * tensor.sign().to(torch.int64) % at.p


def _parting(marks: Mapping[Node, object], mine: Sequence[Node], theirs: Sequence[Node]) -> Node:
    """The first step to results of one whose value is none on the way to those of the other."""
    mine_all, theirs_all = (
        reached(one, lambda node: node.all_input_nodes) for one in (mine, theirs)
    )
    known = {marks[node] for node in theirs_all if node in marks}
    new = (node for node in sorted(mine_all) if node in marks and marks[node] not in known)
    return next(new, mine[0])
