"""``mf.audit`` of two functions that call no fused operator: proved equal, different, or not
decided.

Both are exported as one graph, which is run at random points of a finite field, where sums and
products are exact (:mod:`mla_fusion.prove`). Equal there is equal over the real numbers; rounding
is left out. Then float64 has to agree, and each function with its graph.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from mla_fusion.commit.interpreter import Interpreter, Unrunnable, widened
from mla_fusion.compat import OpOverload, tree_leaves, tree_map_only
from mla_fusion.fx.kinds import is_float, is_getitem, kind_of
from mla_fusion.fx.module_path import label, source
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached
from mla_fusion.operators.known import Kind, value_of
from mla_fusion.prove import field, operators
from mla_fusion.prove.evaluate import Evaluation, Unproved, is_same
from mla_fusion.prove.field import Complex, Num, Point, Undecided, Value
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.memory import Inputs, Target, Tensors
from mla_fusion.tools.by_hand.outcome import Audit, Finding

_POINTS = 3
_SIGNS = 32  # of numbers that a root is taken of, that are drawn
# more than the degree of what a model computes, roots and quotients multiplied out
_DEGREE = 100_000
_DIFFERENT = 1e-6  # of the largest number; float64 is off by 1e-13 or so
_REFUTES = 1e-3  # of a proof: what float64 loses between equal spellings is less
_ROUNDED = 2e-2  # of a graph, compared with the function that it was exported from
_SIZES = {"inputs of size 0.001": 1e-3, "inputs of size 1000": 1e3, "zeros": 0.0}


class AsModule(nn.Module):
    """A function, or the method of a module, which is found so, and copied."""

    def __init__(self, function: Target) -> None:
        super().__init__()
        self.function, self.owner = function, getattr(function, "__self__", None)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class _Both(nn.Module):
    """Functions one after the other, each on copies of the inputs: the tensors that each gives, and
    what it leaves in its inputs. forms: what the results of each look like.
    """

    def __init__(self, targets: Sequence[Target], forms: list[str]) -> None:
        super().__init__()
        modules = (one if isinstance(one, nn.Module) else AsModule(one) for one in targets)
        self.targets, self.forms = nn.ModuleList(modules), forms

    def forward(self, *inputs: Any) -> list[list[Tensor]]:
        found = []
        for target in self.targets:
            given = tree_map_only(Tensor, torch.clone, inputs)
            made = target(*given)
            self.forms.append(repr(tree_map_only(Tensor, lambda v: tuple(v.shape), made)))
            found.append(memory.tensors_in((made, given)))
        return found


def compare(fused: Target, reference: Target, inputs: Inputs) -> Audit:
    """Neither calls an operator of the contract."""
    both, forms = (fused, reference), list[str]()
    runs = [memory.values_of(target, inputs) for target in both]
    try:
        with memory.kept(fused), memory.kept(reference), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch, about itself
            given = tuple(memory.copied(inputs))
            program = torch.export.export(_Both(both, forms), given, strict=False)
            graph = _Graph(program.run_decompositions({}), inputs)
        if any(run.rebound for run in runs):
            raise Undecided("a run binds another tensor to a name of a module")
        if forms[0] != forms[1]:
            said = f"one gives {forms[0]}; the other {forms[1]}"
            return Audit((), (Finding("results.differ", said),), False)
        parts, proof = graph.compared()
    except Exception as error:
        node = error.args[1] if isinstance(error, Unproved) else None
        said = f"not decided: {type(error).__name__}: {str(error.args[0]).partition(chr(10))[0]}"
        return _undecided("step.unknown", said, source(node) if node else "")
    for name, draw in _draws(inputs):
        try:
            mine, theirs = graph.in_float64(draw)
        except Unrunnable:
            continue
        errors = {key: _distance(mine[key], value) for key, value in theirs.items()}
        if draw is inputs and any(
            _distance(values[key], run.after[key]) > _ROUNDED
            for values, run in zip((mine, theirs), runs, strict=True)
            for key in values
        ):
            said = "not decided: a function gives another result than the graph exported of it"
            return _undecided("export.other", said, errors=errors, draws=(name,))
        largest = max(errors, key=errors.__getitem__, default="")
        said = f"on {name}, {largest} differs by {errors.get(largest, 0):.2g} of its largest number"
        more: dict[str, Any] = {"errors": errors, "draws": (name,), "witness": tuple(draw)}
        if proof and not all(error <= _REFUTES for error in errors.values()):
            said = f"not decided: equal in exact arithmetic, but {said}"
            return _undecided("values.apart", said, **more)
        if not proof and any(_DIFFERENT < error < math.inf for error in errors.values()):
            said = f"{said}. The two part at {' and '.join(map(_told, parts))}"
            line = next(filter(None, map(source, parts)), "")
            return Audit((), (Finding("values.differ", said, line=line),), False, **more)
    if not proof:
        said = "not decided: neither proved equal nor seen to differ. The two part at "
        lines = (*map(source, parts), "")
        return _undecided("graphs.part", said + " and ".join(map(_told, parts)), lines[0])
    errors = memory.errors(*reversed(runs))
    if not all(error <= _ROUNDED for error in errors.values()):
        said = "not decided: equal over the real numbers, but not as the two round"
        return _undecided("values.apart", said, errors=errors)
    seen = [
        Finding(
            "results.dtype",
            f"{name} is {mine.dtype}; the reference's is {other.dtype}",
            certain=False,
        )
        for name, mine in runs[0].after.items()
        if (other := runs[1].after.get(name)) is not None and other.dtype != mine.dtype
    ]
    return Audit((), tuple(seen), True, proof=proof)


def _undecided(code: str, said: str, line: str = "", **more: Any) -> Audit:
    return Audit((), (Finding(code, said, line=line, certain=False),), **more)


def _told(node: Node) -> str:
    return f"{label(node)} ({node.target})"


class _Graph:
    """Both functions as one graph that writes nothing.

    held     by placeholder: what is no input
    results  of each function, by name
    """

    def __init__(self, program: ExportedProgram, inputs: Inputs) -> None:
        signature = program.graph_signature
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
            raise Undecided("a buffer is written; give it as an argument instead")
        self.view = View(program.graph_module)
        for node in self.view.nodes:
            _check_function(node)
        leaves = [node for node in self.view.nodes if node.op == "placeholder"]
        tensors = {**program.constants, **program.state_dict}
        held = [spec.target for spec in signature.input_specs if spec.target is not None]
        self.held = {n: tensors[name].detach() for n, name in zip(leaves, held, strict=False)}
        self.given = leaves[len(held) :]
        outputs = self.view.nodes[-1].args[0]
        half = len(outputs) // 2
        written = [*memory.named(inputs)]
        names = [f"output {place}" for place in range(half - len(written))] + written
        parts = outputs[:half], outputs[half:]
        self.results = [dict(zip(names, part, strict=True)) for part in parts]

    def compared(self) -> tuple[list[Node], str]:
        """The first steps of each at which the two part, and what was shown where none does. Raises
        Unproved for a step that has no value in the field.
        """
        roles = {node: "x" if is_float(value_of(node).dtype) else "" for node in self.given}
        mine, theirs = self.results
        draw, count, fewest = 0, 0, _SIGNS
        while draw < _POINTS or draw * fewest < _SIGNS:
            point = Point(draw, are_rows=False, float16=False)
            with field.at(point):
                run = _AtPoint(self.view, roles | dict.fromkeys(self.held, "weight"))
                run.held = self.held
                values = {name: run.value(node) for name, node in theirs.items()}
                apart = [name for name in mine if not is_same(run.value(mine[name]), values[name])]
                if apart:
                    sides = [[one[name] for name in apart] for one in self.results]
                    return [*_parting(run, *sides), *_parting(run, *reversed(sides))], ""
            count += sum(part.numel() for value in values.values() for part in _parts(value))
            fewest = min([fewest, *(root.re.numel() or fewest for root in point.roots)])
            draw += 1
        if not count:
            raise Undecided("no result has an element to compare")
        wrong = (_DEGREE / field.P) ** _POINTS + 0.5 ** (fewest * draw)
        chance = f"wrong by a chance below {wrong:.0e}"
        return [], f"{count:,} values at {draw} points of a finite field, {chance}"

    def in_float64(self, inputs: Inputs) -> list[Tensors]:
        """What each gives, with all floats in float64. Raises Unrunnable."""
        leaves = dict(zip(self.given, tree_leaves(inputs), strict=True)) | self.held
        given = {node: widened(value) for node, value in leaves.items()}
        runner = Interpreter(self.view.nodes[:-1], self.view.binding, wide=True)
        wanted = [node for one in self.results for node in one.values()]
        with torch.random.fork_rng(devices=[]):
            env = runner.run(given, wanted)
        return [{name: env[node] for name, node in one.items()} for one in self.results]


def _check_function(node: Node) -> None:
    """Raises Undecided for what is no function of what it reads, or whose size values say."""
    if node.op in ("placeholder", "output"):
        return
    if not (isinstance(node.target, OpOverload) or is_getitem(node)):
        raise Undecided(f"{node.name} ({node.target}) runs another graph")
    if kind_of(node) is Kind.RANDOM:
        raise Undecided(f"{node.name} ({node.target}) is random")
    for part in tree_leaves(value_of(node)):
        sizes = part.shape if isinstance(part, Tensor) else (part,)
        if not all(isinstance(size, int) for size in sizes):
            raise Undecided(f"{node.name} ({node.target}) makes a size, or a number, of values")


class _AtPoint(Evaluation):
    """A weight is known by its numbers: so are copies, joins and transposes of it."""

    held: dict[Node, Tensor]

    def _leaf(self, node: Node, role: str) -> Any:
        tensor = self.held.get(node)
        return super()._leaf(node, role) if tensor is None else _by_numbers(tensor)


def _by_numbers(tensor: Tensor) -> Value:
    """Equal numbers are equal elements, wherever they lie."""
    if tensor.is_complex():
        return Complex(*(operators.real(_by_numbers(part)) for part in (tensor.real, tensor.imag)))
    if not tensor.is_floating_point() or (tensor.numel() == 1 and bool(tensor.isfinite())):
        return field.exact(tensor)
    bits = tensor.double().abs().contiguous().view(torch.int64)
    root = field.function("number", Num(bits & 0x7FFFFFFF), Num(bits >> 31))
    # a square, and its negative is none: so the root of a square is its size
    return root * root * Num(tensor.sign().to(torch.int64).remainder(field.P))


def _parts(value: Any) -> list[Num]:
    """The tensors of a value."""
    leaves = tree_leaves(value)
    sides = ((one.real, one.imag) if isinstance(one, Complex) else (one,) for one in leaves)
    return [part for both in sides for part in both if isinstance(part, Num)]


def _parting(run: Evaluation, mine: Sequence[Node], theirs: Sequence[Node]) -> list[Node]:
    """The first step to results of one whose value is none on the way to those of the other."""

    def marked(results: Sequence[Node]) -> dict[Node, int]:
        nodes = reached(results, lambda node: node.all_input_nodes)
        return {node: int(field.label(*_parts(run.value(node))).re) for node in nodes}

    known, steps = {*marked(theirs).values()}, marked(mine)
    return [node for node in run.view.nodes if node in steps and steps[node] not in known][:1]


def _draws(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    yield "the inputs as given", inputs
    for name, size in _SIZES.items():

        def draw(value: Tensor, size: float = size) -> Tensor:
            return value * 0 + torch.randn(value.shape).to(value.dtype) * size

        def drawn(value: Tensor) -> Tensor:
            return draw(value) if is_float(value.dtype) else value

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield name, list(tree_map_only(Tensor, drawn, list(inputs)))


def _distance(one: Tensor, other: Tensor) -> float:
    """Relative to the largest number; infinite where one alone is no number, or of other shape."""
    if one.shape != other.shape:
        return math.inf
    both = torch.stack([part.to(torch.complex128) for part in (one, other)])
    odd = ~both.isfinite()
    if not torch.equal(*odd) or not torch.equal(*both.real.nan_to_num(2).masked_fill(~odd, 0)):
        return math.inf
    a, b = both.masked_fill(odd, 0)
    off = float((a - b).abs().max()) if a.numel() else 0.0
    return off and off / float(b.abs().max().clamp_min(1e-300))
