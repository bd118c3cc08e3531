"""``mf.audit`` of two functions that call no fused operator: proved equal, different, or not
decided.

Both are exported, and run at random points of a finite field, where sums and products are exact and
all else is a function of which nothing is known (:mod:`mla_fusion.prove`). Equal there is equal
over the real numbers; rounding and casts between floats are left out. What is not equal there is
run in float64, for an input that shows the difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter, Node

from mla_fusion.compat import OpOverload, tree_leaves, tree_map_only
from mla_fusion.fx.kinds import argument
from mla_fusion.fx.operators import Kind, known
from mla_fusion.prove import field, operators
from mla_fusion.prove.evaluate import UNKNOWN, dtype_of
from mla_fusion.prove.field import Complex, Num, Point, Undecided, Value
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.calls import last_line
from mla_fusion.tools.by_hand.outcome import Audit, Finding

POINTS = 3
# more than the degree of what a model computes, roots and quotients multiplied out
DEGREE = 100_000
MOST_POINTS = 16
OVERFLOWING = "inputs of size 1000"
BITS = 32  # signs of roots that are seen
# Of inputs that are drawn for a difference: a mean square of 1e-6 shows an epsilon, less a floor.
SIZES = (1e-3, 1.0, 1e3, 1e-8)
DIFFERENT = 1e-9  # relative to the largest number; float64 is off by 1e-13 or so
NOISE = 100.0  # times what steps, rounded otherwise in float64, change: less is rounding
REFUTES = 1e-3  # of a proof: what float64 loses between equal spellings is less
ROUNDED = 2e-2  # of a graph, compared with the function that it was exported from
WIDE = 33  # binary digits of integers that are drawn: more than an int32 has
ROOTS = ("sqrt", "norm", "pow", "std", "abs")  # in names of operators that may take a root
_FEW = 8  # elements of an input for each of which both signs are tried
_MOST_PARTS = 3  # steps that are named
_CONSTANT = InputKind.CONSTANT_TENSOR


@dataclass(frozen=True)
class Exported:
    """A function as a graph that writes nothing.

    held     by placeholder: the tensor that a parameter, a buffer or a constant is
    given    by placeholder: the place of the input among all tensors that the caller gives
    buffers  by name, the placeholders that are buffers
    results  by name, the outputs and what was written
    numbers  by name, the outputs that are no tensors
    """

    gm: GraphModule
    held: dict[Node, tuple[InputKind, Tensor]]
    given: dict[Node, int]
    buffers: dict[str, Node]
    results: dict[str, Node]
    numbers: dict[str, Any]

    def renamed(self, names: Mapping[str, str]) -> Exported:
        """With the names that the reference has, unless two become one."""

        def named(held: dict[str, Node]) -> dict[str, Node]:
            found = {names.get(name, name): node for name, node in held.items()}
            return found if len(found) == len(held) else held

        return replace(self, results=named(self.results), buffers=named(self.buffers))


def compare(
    fused: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Any]
) -> Audit:
    """Neither calls an operator of the contract."""
    both = []
    for target, role in ((fused, "the function"), (reference, "the reference")):
        try:
            both.append(_exported(target, inputs))
        except Exception as error:
            said = f"{role} cannot be exported as one graph: {_first_line(error)}"
            return Audit((), (Finding("export.fails", said, certain=False),))
    mine, theirs = both[0].renamed(memory.paired(fused, reference)), both[1]
    found = _compared(mine, theirs, inputs)
    if found.equal is None:
        return found
    for of, target, role in (mine, fused, "the function"), (theirs, reference, "the reference"):
        if name := _other_than_run(of, target, inputs):
            said = f"not decided: {role} gives another {name} than the graph that is exported of it"
            return Audit((), (Finding("export.other", said, certain=False),))
    return found


def _compared(mine: Exported, theirs: Exported, inputs: Sequence[Any]) -> Audit:
    seen = list(_unordered(mine, theirs))
    if mine.results.keys() != theirs.results.keys() or repr(mine.numbers) != repr(theirs.numbers):
        one, other = (
            ", ".join([*of.results, *(f"{name} = {number}" for name, number in of.numbers.items())])
            for of in (mine, theirs)
        )
        said = f"one gives {one}; the other {other}"
        return Audit((), (Finding("results.differ", said), *seen), False)
    seen += _other_dtypes(mine, theirs)
    states = _states(mine, theirs)
    unequal: dict[str, None] = {}
    count = 0
    fewest = min(map(_fewest, (mine, theirs)))
    points = min(MOST_POINTS, max(POINTS, -(-BITS // fewest)))
    for draw in range(points):
        with field.at(Point(draw, are_rows=False)):
            try:
                runs = _Run(mine, states), _Run(theirs, states)
            except UNKNOWN as error:
                said = f"not decided: {error}"
                return Audit((), (Finding("step.unknown", said, certain=False), *seen))
            for name, node in theirs.results.items():
                one, other = runs[0].values[mine.results[name]], runs[1].values[node]
                if _mark(one) != _mark(other):
                    unequal[name] = None
                count += sum(value.re.numel() for value in _parts(other))
        if unequal:
            return _unproved(mine, theirs, list(unequal), runs, inputs, seen)
    errors, drawn, witness = _witness(mine, theirs, inputs, REFUTES)
    if errors is not None:
        said = f"not decided: equal in exact arithmetic, but on {drawn}, {_largest(errors)}"
        found = Finding("values.apart", said, certain=False)
        return Audit((), (found, *seen), None, errors, draws=(drawn,), witness=witness)
    wrong = (DEGREE / field.P) ** POINTS + 0.5 ** min(fewest * points, 1000)
    chance = f"wrong by a chance below {wrong:.0e}"
    proof = f"{count:,} values at {points} points of a finite field, {chance}"
    return Audit((), tuple(seen), True, proof=proof)


def _fewest(of: Exported) -> int:
    """Elements of the smallest root: that of a square has either sign, so few need many points."""
    roots = (node for node in of.gm.graph.nodes if any(name in str(node.target) for name in ROOTS))
    made = (node.meta.get("val") for node in roots)
    sizes = (value.numel() for value in made if isinstance(value, Tensor))
    return min(filter(None, sizes), default=1000)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- as a graph


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def _exported(target: Callable[..., Any], inputs: Sequence[Any]) -> Exported:
    module = target if isinstance(target, nn.Module) else _Function(target)
    with memory.kept(target), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about itself
        program = torch.export.export(module, tuple(memory.copied(inputs)), strict=False)
        program = program.run_decompositions({})
    _write_epsilons(program.graph_module)
    nodes = {node.name: node for node in program.graph.nodes}
    held: dict[Node, tuple[InputKind, Tensor]] = {}
    given: dict[Node, int] = {}
    buffers: dict[str, Node] = {}
    places: dict[str, int] = {}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            given[node] = places[spec.arg.name] = len(given)
            continue
        name = spec.target or ""
        tensor = program.state_dict.get(name, program.constants.get(name))
        if not isinstance(tensor, Tensor):
            raise Undecided(f"{name} is no tensor")
        held[node] = spec.kind, tensor.detach()
        if spec.kind is InputKind.BUFFER:
            buffers[f"buffer {name}"] = node
    results, numbers = {}, {}
    outputs = iter(_named(program.call_spec.out_spec))
    for spec in program.graph_signature.output_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind is OutputKind.USER_OUTPUT:
            name = next(outputs)
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            name = f"input {places[spec.target or '']}"
        else:
            name = f"buffer {spec.target}"
        if name in results or name in numbers:
            raise Undecided(f"two results are called {name}")
        if node is not None:
            results[name] = node
        elif (value := getattr(spec.arg, "value", None)) is not None:
            numbers[name] = value
    return Exported(program.graph_module, held, given, buffers, results, numbers)


def _write_epsilons(gm: GraphModule) -> None:
    """What is left out depends on a dtype: it stays what it is when the graph is run in another."""
    for node in gm.graph.nodes:
        if "rms_norm" in str(node.target) and argument(node, "eps", 0) is None:
            wide = dtype_of(node.args[0]) is torch.float64
            epsilon = torch.finfo(torch.float64 if wide else torch.float32).eps
            node.args, node.kwargs = node.args[:3], {**node.kwargs, "eps": epsilon}


def _named(spec: Any) -> list[str]:
    """Where each output lies: in a dict, under its key."""
    names: dict[int, str] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, Mapping):
            for key, each in item.items():
                walk(each, f"{path}.{key}")
        elif isinstance(item, (list, tuple)):
            for place, each in enumerate(item):
                walk(each, f"{path}.{place}")
        elif isinstance(item, int):
            names[item] = f"output {path.removeprefix('.') or 0}"

    walk(spec.unflatten(list(range(spec.num_leaves))), "")
    return [names.get(place, f"output leaf {place}") for place in range(spec.num_leaves)]


def _unordered(*both: Exported) -> Iterator[Finding]:
    """Weights that hold one number many times: nothing shows where each of its elements goes."""
    found = {
        node.name: tuple(tensor.shape)
        for each in both
        for node, (kind, tensor) in each.held.items()
        if kind is InputKind.PARAMETER
        and tensor.numel() > 1
        and bool((tensor == tensor.reshape(-1)[0]).all())
    }
    if found:
        said = (
            f"each of {', '.join(found)} holds one number only, so that an order of it, or "
            "another, is not seen"
        )
        yield Finding("weight.uniform", said, certain=False)


def _other_dtypes(mine: Exported, theirs: Exported) -> Iterator[Finding]:
    """Equal numbers may be held in other dtypes."""
    for name, node in theirs.results.items():
        one, other = dtype_of(mine.results[name]), dtype_of(node)
        if one != other:
            said = f"{name} is {one}; the reference's is {other}"
            yield Finding("results.dtype", said, certain=False)


def _states(mine: Exported, theirs: Exported) -> dict[Node, str]:
    """Buffers that both write: they may hold anything when they are called again, so long as both
    hold the same now.
    """
    found: dict[Node, str] = {}
    for name in mine.results.keys() & mine.buffers.keys() & theirs.buffers.keys():
        nodes = [of.buffers[name] for of in (mine, theirs)]
        one, other = (of.held[node][1] for of, node in zip((mine, theirs), nodes, strict=True))
        if memory.same_bits(one, other):
            found |= dict.fromkeys(nodes, name)
    return found


def _other_than_run(of: Exported, target: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """A result that the function itself gives otherwise: what it does when it is traced, or when it
    is called again, is something else then.
    """
    given = memory.copied(inputs)
    try:
        with memory.kept(target), torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = [leaf for leaf in tree_leaves(target(*given)) if isinstance(leaf, Tensor)]
            held = target.named_buffers() if isinstance(target, nn.Module) else ()
            run = {f"buffer {name}": value.clone() for name, value in held}
        graph = Interpreter(of.gm, garbage_collect_values=False)
        exported = _values(of, memory.copied(inputs), graph)
    except Exception as error:
        return f"result ({_first_line(error)})"
    run |= {f"input {place}": leaf for place, leaf in enumerate(tree_leaves(given))}
    run |= dict(zip((name for name in of.results if "output" in name), outputs, strict=False))
    known = (name for name in of.results if name in run)
    return next((name for name in known if not _are_near(run[name], exported[name])), "")


def _are_near(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and _distance(one, other, no_number=True) <= ROUNDED


# -- in the field


class _Run:
    """The values of one graph at the point that is set. A weight is known by its numbers."""

    def __init__(self, of: Exported, states: Mapping[Node, str]) -> None:
        self._of, self._states = of, states
        self.values: dict[Node, Any] = {}
        for node in of.gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._leaf(node)
            elif node.op == "call_function":
                self.values[node] = self._called(node)
            elif node.op != "output":
                raise Undecided(f"{node.name} is another graph")

    def _leaf(self, node: Node) -> Any:
        place, value = self._of.given.get(node, len(self._of.given)), node.meta.get("val")
        if node in self._states:
            name = self._states[node]
        elif node in self._of.held:
            kind, tensor = self._of.held[node]
            return _by_numbers(tensor, exactly=kind is _CONSTANT)
        else:
            name = f"input {place}"
        if not isinstance(value, Tensor):
            return value
        if value.is_complex():
            return Complex(
                field.random(f"{name} real", value.shape), field.random(f"{name} imag", value.shape)
            )
        if value.numel() <= _FEW:
            return field.of_both_signs(name, value.shape, _FEW * place, POINTS)
        return field.random(name, value.shape)

    def _called(self, node: Node) -> Any:
        held = node.meta.get("val")
        _undecided(node)
        args, kwargs = self._filled(node.args), self._filled(node.kwargs)
        if not isinstance(node.target, OpOverload):
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a getitem
        one = held if isinstance(held, Tensor) else None
        source = next((arg.meta["val"] for arg in node.all_input_nodes), None)
        call = operators.called(
            node.target,
            args,
            kwargs,
            shape=tuple(one.shape) if one is not None else None,
            dtype=one.dtype if one is not None else None,
            source=source.dtype if isinstance(source, Tensor) else None,
            masks=any(operators.is_mask(arg.meta.get("val")) for arg in node.all_input_nodes),
            holds=lambda name: dtype_of(argument(node, name)),
        )
        by_element = torch.Tag.pointwise in node.target.tags
        for way in (operators.run, *[operators.pointwise] * by_element):
            try:
                found = way(call)
                if one is None and isinstance(found, list):
                    return found
                if one is not None and tuple(found.shape) == tuple(one.shape):
                    made_here = call.name in operators.RULES and not node.all_input_nodes
                    return _complex(found, one, known=made_here)
            except Exception:  # what has no rule for these arguments
                continue
        return self._unknown(call, held)

    def _unknown(self, call: operators.Call, held: Any) -> Any:
        """Results of which no more is known than what they are made of."""
        if isinstance(held, Tensor):
            return _complex(operators.opaque(replace(call, shape=tuple(held.shape))), held)

        def named(place: int, part: Tensor) -> operators.Call:
            return replace(call, name=f"{call.name} {place}", shape=tuple(part.shape))

        made = [
            _complex(operators.opaque(named(place, part)), part)
            for place, part in enumerate(held if isinstance(held, (tuple, list)) else ())
            if isinstance(part, Tensor)
        ]
        return made

    def _filled(self, given: Any) -> Any:
        return tree_map_only(Node, self.values.__getitem__, given)

    @cached_property
    def marks(self) -> dict[Node, object]:
        return {node: _mark(value) for node, value in self.values.items()}


def _undecided(node: Node) -> None:
    """Raises Undecided for what is no function of what it reads, or whose size values say."""
    target, held = node.target, node.meta.get("val")
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        p = node.args[1] if len(node.args) > 1 else None
        is_dropout = "dropout" in str(target) and not (p and node.args[2:3] != (False,))
        if not is_dropout and argument(node, "dropout_p", 1) != 0:
            raise Undecided(f"{node.name} ({target}) is random")
    module = str(getattr(target, "__module__", ""))
    if not isinstance(target, OpOverload) and not module.endswith("operator"):
        raise Undecided(f"{node.name} ({target}) runs other graphs")
    for part in tree_leaves(held):
        sizes = tuple(part.shape) if isinstance(part, Tensor) else (part,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            raise Undecided(f"{node.name} ({target}) makes a size, or a plain number, of values")


def _complex(found: Value, held: Tensor, known: bool = False) -> Value:
    """Of a complex result both parts: ``known`` to be real, or functions of what is known of it."""
    if isinstance(found, Complex) or not held.is_complex():
        return found
    if known:
        return Complex(found, field.number(0).moved(lambda part: part.expand(found.shape)))
    return Complex(field.function("real part", found), field.function("imaginary part", found))


def _by_numbers(tensor: Tensor, exactly: bool) -> Value:
    """Equal numbers are equal elements, wherever they lie: so copies, joins and transposes of
    weights are known.
    """
    if tensor.is_complex():
        return Complex(_by_numbers(tensor.real, exactly), _by_numbers(tensor.imag, exactly))  # type: ignore[arg-type]
    if exactly and tensor.numel() <= 1 << 16 and bool(tensor.isfinite().all()):
        return field.exact(tensor)
    if not tensor.is_floating_point():
        return field.integers(tensor)
    bits = tensor.double().abs().contiguous().view(torch.int64)
    root = field.function("number", Num(bits & 0x7FFFFFFF), Num(bits >> 31))
    # a square, and its negative is none: so the root of a square is its size
    size = field.mul(root, root)
    sign = Num(tensor.sign().to(torch.int64).remainder(field.P))
    return field.mul(size, sign)


def _parts(value: Any) -> list[Num]:
    if isinstance(value, Complex):
        return [value.real, value.imag]
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in _parts(each)]
    return [value] if isinstance(value, Num) else []


def _mark(value: Any) -> object:
    """Equal for equal values of one shape."""
    parts = _parts(value)
    shape = (
        tuple(value.shape)
        if isinstance(value, (Num, Complex))
        else repr(value)
        if not parts
        else None
    )
    return shape, tuple(int(field.label(part).re) for part in parts)


# -- where they are not equal


def _unproved(
    mine: Exported,
    theirs: Exported,
    names: Sequence[str],
    runs: tuple[_Run, _Run],
    inputs: Sequence[Any],
    seen: Sequence[Finding],
) -> Audit:
    parts = [
        _parting(run, each, names, set(other.marks.values()))
        for run, each, other in _sides(mine, theirs, runs)
    ]
    errors, draw, witness = _witness(mine, theirs, inputs, DIFFERENT)
    if errors is None:
        said = "not decided: neither proved equal nor seen to differ in float64. They part at "
        return Audit(
            (),
            (Finding("graphs.part", said + _told(parts), line=_line(parts), certain=False), *seen),
        )
    said = f"on {draw}, {_largest(errors)}. The two part at {_told(parts)}"
    found = Finding("values.differ", said, line=_line(parts))
    return Audit((), (found, *seen), False, errors, draws=(draw,), witness=witness)


def _sides(
    mine: Exported, theirs: Exported, runs: tuple[_Run, _Run]
) -> Iterator[tuple[_Run, Exported, _Run]]:
    yield runs[0], mine, runs[1]
    yield runs[1], theirs, runs[0]


def _parting(run: _Run, of: Exported, names: Sequence[str], known: set[object]) -> list[Node]:
    """The first steps on the way to these results whose values the other graph does not have."""
    stack = [of.results[name] for name in names]
    seen, found = set(stack), []
    while stack:
        node = stack.pop()
        before = [read for read in node.all_input_nodes if run.marks[read] not in known]
        if not before and run.marks[node] not in known:
            found.append(node)
        stack += [read for read in before if read not in seen]
        seen.update(before)
    order = {node: place for place, node in enumerate(of.gm.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _told(parts: Sequence[Sequence[Node]]) -> str:
    sides = [
        ", ".join(f"{node.name} ({node.target})" for node in side[:_MOST_PARTS]) for side in parts
    ]
    return (
        " of the function, and ".join(side or "no step of its own" for side in sides)
        + " of the reference"
    )


def _line(parts: Sequence[Sequence[Node]]) -> str:
    return next(
        (line for side in parts for node in side if (line := last_line(node.stack_trace or ""))), ""
    )


def _largest(errors: Mapping[str, float]) -> str:
    name = max(errors, key=errors.__getitem__)
    return f"{name} differs by {errors[name]:.2g} of its largest number, in float64"


def _witness(
    mine: Exported, theirs: Exported, inputs: Sequence[Any], above: float
) -> tuple[dict[str, float] | None, str, tuple[Any, ...] | None]:
    """Inputs on which float64 shows a difference, and how large it is of each result.

    To be called different they have to be so by far more than steps, rounded otherwise, make of
    either. Against a proof anything counts, what is no number in one alone too, but for an overflow
    of large inputs.
    """
    refutes = above == REFUTES
    for name, draw in _draws(inputs):
        try:
            runs = [_Wide(of.gm) for of in (mine, theirs)]
            one, other = (
                _in_float64(of, draw, run) for of, run in zip((mine, theirs), runs, strict=True)
            )
            # what is too large for float64 is no difference over the real numbers
            if any(run.overflows for run in runs) and (not refutes or name == OVERFLOWING):
                continue
            errors = {key: _distance(one[key], other[key], refutes) for key in other}
            if max(errors.values(), default=0.0) <= above:
                continue
            if refutes:
                return errors, name, tuple(draw)
            near = [_in_float64(of, draw, _Wide(of.gm, is_rounded=True)) for of in (mine, theirs)]
        except Exception:  # an operator that takes no float64
            continue
        moved = ((one, near[0]), (other, near[1]))
        noise = {key: sum(_distance(a[key], b[key]) for a, b in moved) for key in other}
        if any(error > max(above, NOISE * noise[key]) for key, error in errors.items()):
            return errors, name, tuple(draw)
    return None, "", None


def _draws(inputs: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    yield "the inputs as given", list(inputs)
    tensors = [leaf for leaf in tree_leaves(list(inputs)) if isinstance(leaf, Tensor)]
    for seed, size in enumerate(SIZES):
        yield f"inputs of size {size:g}", _drawn(inputs, seed, size)
    yield "zeros", _drawn(inputs, 0, 0.0)
    yield "small whole numbers", _drawn(inputs, 0, 2.0, are_whole=True)
    if any(tensor.dtype.itemsize == 1 for tensor in tensors):
        yield "other bytes", _drawn(inputs, 0, None, most=1)
    if any(not tensor.is_floating_point() and tensor.dtype.itemsize > 1 for tensor in tensors):
        yield "other integers", _drawn(inputs, 0, None)


def _drawn(
    inputs: Sequence[Any], seed: int, size: float | None, are_whole: bool = False, most: int = 8
) -> list[Any]:
    """Floats of a size, or else integers of all that they may hold (of ``most`` bytes): sums and
    products of them wrap.
    """
    drawn = torch.Generator().manual_seed(seed)

    def draw(value: Tensor) -> Tensor:
        if value.is_floating_point():
            if size is None:
                return value
            found = torch.randn(value.shape, generator=drawn, dtype=torch.float64) * size
            return (found.round().clamp(-size, size) if are_whole else found).to(value.dtype)
        if value.dtype is torch.bool and size in (0.0, 2.0):  # a mask of nothing, or of all
            return torch.full_like(value, size == 2.0)
        if size is not None or value.is_complex() or value.dtype.itemsize > most:
            return value
        least, end = (0, 2) if value.dtype is torch.bool else _ends(value.dtype)
        return torch.randint(least, end, value.shape, generator=drawn).to(value.dtype)

    found: list[Any] = tree_map_only(Tensor, draw, list(inputs))
    return found


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """The least integer, and the one behind the largest; fewer than an int64 has, of which float64
    has all.
    """
    info = torch.iinfo(dtype)
    return max(info.min, -1 << WIDE), min(info.max + 1, 1 << WIDE)


def _in_float64(of: Exported, inputs: Sequence[Any], run: _Wide) -> dict[str, Tensor]:
    return _values(of, [_wide(leaf) for leaf in tree_leaves(memory.copied(inputs))], run, _wide)


def _values(
    of: Exported, given: Sequence[Any], run: Interpreter, held: Callable[[Any], Any] = lambda v: v
) -> dict[str, Tensor]:
    """What the run makes of these inputs, and of what is held."""
    leaves = tree_leaves(given)
    read = [
        held(of.held[node][1]) if node in of.held else leaves[of.given[node]]
        for node in of.gm.graph.find_nodes(op="placeholder")
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        run.run(*read)
    return {name: run.env[node] for name, node in of.results.items()}


class _Wide(Interpreter):
    """Whatever is cast to a float, or made as one, is float64.

    is_rounded  each step is off in its last bits
    overflows   a number left what float64 holds
    """

    def __init__(self, gm: GraphModule, is_rounded: bool = False) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.overflows = False
        self._drawn = torch.Generator().manual_seed(0) if is_rounded else None

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().placeholder(target, args, kwargs)
        return self._rounded(found) if isinstance(found, Tensor) else found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.dtype, _wide_dtype, (args, dict(kwargs)))
        found = super().call_function(target, args, kwargs)
        # of integers, or of the default dtype
        if isinstance(found, Tensor) and found.dtype == torch.float32:
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
                kwargs = {**kwargs, "dtype": torch.float64}
            args, kwargs = tree_map_only(Tensor, Tensor.double, (args, kwargs))
            found = super().call_function(target, args, kwargs)
        self.overflows |= _overflow(found, (args, kwargs))
        if self._drawn is not None and known(target).kind in (Kind.ANALYTIC, Kind.RANDOM):
            return tree_map_only(Tensor, self._rounded, found)
        return found

    def _rounded(self, value: Tensor) -> Tensor:
        if self._drawn is None or not (value.is_floating_point() or value.is_complex()):
            return value
        off = torch.randn(value.shape, generator=self._drawn, dtype=torch.float64)
        return value * (1 + 4e-16 * off)


def _overflow(found: Any, given: Any) -> bool:
    """Is a number of what was found too large, or too small to be exact, and none of the given?"""
    floats = [leaf for leaf in tree_leaves(given) if isinstance(leaf, (float, Tensor))]
    if not all(bool(torch.as_tensor(leaf).isfinite().all()) for leaf in floats):
        return False
    made = (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
    least = torch.finfo(torch.float64).tiny
    return any(
        bool((part.isinf() | ((part != 0) & (part.abs() < least))).any())
        for part in made
        if part.is_floating_point()
    )


def _wide(value: Any) -> Any:
    return value.to(_wide_dtype(value.dtype)) if isinstance(value, Tensor) else value


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return (
        torch.complex128
        if dtype.is_complex
        else torch.float64
        if dtype.is_floating_point
        else dtype
    )


def _distance(one: Tensor, other: Tensor, no_number: bool = False) -> float:
    """Relative to the largest number. ``no_number``: nan or infinite in one alone is far apart."""
    if one.shape != other.shape:
        return float("inf")
    if not other.numel() or torch.equal(one, other):
        return 0.0
    wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float64)
    one, other = one.to(wide), other.to(wide)
    finite = one.isfinite() & other.isfinite()
    if no_number and bool((one.isfinite() != other.isfinite()).any()):
        return float("inf")
    same = (one == other) | ~finite
    if bool(same.all()):
        return 0.0
    apart = (one - other).masked_fill(same, 0).abs()
    size = torch.maximum(one.abs(), other.abs()).masked_fill(~finite, 0)
    return float(apart.max() / size.max())
