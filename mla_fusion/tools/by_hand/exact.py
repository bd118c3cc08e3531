"""``mf.audit`` of two functions that call no fused operator: proved equal, different, or not
decided.

Both are exported, and run at random points of a finite field, where sums and products are exact and
all else is a function of which nothing is known (:mod:`mla_fusion.prove`). Equal there is equal
over the real numbers; rounding and casts between floats are left out. What is not equal there is
run in float64, for an input that shows the difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter, Node

from mla_fusion.commit.interpreter import wide, widened
from mla_fusion.compat import OpOverload, tree_leaves, tree_map_only
from mla_fusion.fx.kinds import argument, is_cast, is_float, kind_of
from mla_fusion.fx.walk import reached
from mla_fusion.operators.known import Kind, known, value_of
from mla_fusion.prove import field, operators
from mla_fusion.prove.evaluate import UNKNOWN, dtype_held
from mla_fusion.prove.field import Complex, Num, Point, Undecided, Value
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.calls import AsModule, Target, last_line
from mla_fusion.tools.by_hand.memory import Inputs, Tensors
from mla_fusion.tools.by_hand.outcome import Audit, Errors, Finding

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

    target   the function, and what it is called: "the function", or "the reference"
    held     by placeholder: the tensor that a parameter, a buffer or a constant is
    given    by placeholder: its place among the inputs
    buffers  by name, placeholders
    results  by name: outputs, and what inputs and buffers that are written hold afterwards
    numbers  by name, the outputs that are no tensors
    """

    target: Target
    role: str
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


def _undecided(
    code: str, said: str, seen: Sequence[Finding] = (), line: str = "", **more: Any
) -> Audit:
    return Audit((), (Finding(code, said, line=line, certain=False), *seen), **more)


def compare(fused: Target, reference: Target, inputs: Inputs) -> Audit:
    """Neither calls an operator of the contract."""
    both = []
    for target, role in ((fused, "the function"), (reference, "the reference")):
        try:
            both.append(_exported(target, role, inputs))
        except Exception as error:
            said = f"{role} cannot be exported as one graph: {_first_line(error)}"
            return _undecided("export.fails", said)
    both[0] = both[0].renamed(memory.paired(fused, reference))
    found = _compared(both, inputs)
    if found.equal is None:
        return found
    try:
        mine, theirs = (_results(of, inputs) for of in both)
    except Undecided as error:
        return _undecided("export.other", f"not decided: {error}")
    errors = {name: _distance(mine[name], value) for name, value in theirs.items() if found.equal}
    if max(errors.values(), default=0.0) > ROUNDED:
        said = f"not decided: equal over the real numbers, but as rounded, {_largest(errors)}"
        return _undecided("values.apart", said, found.findings, errors=errors)
    return found


def _compared(both: Sequence[Exported], inputs: Inputs) -> Audit:
    mine, theirs = both
    seen = list(_uniform_weights(both))
    if mine.results.keys() != theirs.results.keys() or repr(mine.numbers) != repr(theirs.numbers):
        one, other = (
            ", ".join([*of.results, *(f"{name} = {number}" for name, number in of.numbers.items())])
            for of in both
        )
        said = f"one gives {one}; the other {other}"
        return Audit((), (Finding("results.differ", said), *seen), False)
    for name in theirs.results:  # equal numbers may be held in other dtypes
        dtype, wanted = (dtype_held(of.results[name]) for of in both)
        if dtype != wanted:
            said = f"{name} is {dtype}; the reference's is {wanted}"
            seen.append(Finding("results.dtype", said, certain=False))
    states, count = _states(both), 0
    fewest = min(map(_fewest, both))
    points = min(MOST_POINTS, max(POINTS, -(-BITS // fewest)))
    for draw in range(points):
        with field.at(Point(draw, are_rows=False)):
            try:
                runs = [_InField(of, states) for of in both]
            except UNKNOWN as error:
                return _undecided("step.unknown", f"not decided: {error}", seen)
            marks = [[run.marks[run.of.results[name]] for name in theirs.results] for run in runs]
        named = zip(theirs.results, *marks, strict=True)
        unequal = [name for name, one, other in named if one != other]
        if unequal:
            return _unproved(runs, unequal, inputs, seen)
        results = (runs[1].env[node] for node in theirs.results.values())
        count += sum(value.re.numel() for result in results for value in _parts(result))
    if theirs.results and not count:
        said = "not decided: of these inputs no result has an element to compare"
        return _undecided("results.empty", said, seen)
    if shown := _witness(both, inputs, REFUTES):
        said = f"not decided: equal in exact arithmetic, but {_told_values(**shown)}"
        return _undecided("values.apart", said, seen, **shown)
    wrong = (DEGREE / field.P) ** POINTS + 0.5 ** min(fewest * points, 1000)
    chance = f"wrong by a chance below {wrong:.0e}"
    proof = f"{count:,} values at {points} points of a finite field, {chance}"
    return Audit((), tuple(seen), True, proof=proof)


def _fewest(of: Exported) -> int:
    """Elements of the smallest root: that of a square has either sign, so few need many points."""
    sizes = (
        value.numel()
        for node in of.gm.graph.nodes
        if any(name in str(node.target) for name in ROOTS)
        and isinstance(value := value_of(node), Tensor)
    )
    return min(filter(None, sizes), default=1000)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- as a graph


def _exported(target: Target, role: str, inputs: Inputs) -> Exported:
    module = target if isinstance(target, nn.Module) else AsModule(target)
    with memory.kept(target), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about itself
        program = torch.export.export(module, tuple(memory.copied(inputs)), strict=False)
        program = program.run_decompositions({})
    _write_epsilons(program.graph_module)
    nodes = {node.name: node for node in program.graph.nodes}
    of = Exported(target, role, program.graph_module, {}, {}, {}, {}, {})
    tensors = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        node, name = nodes[spec.arg.name], spec.target or ""
        if spec.kind is InputKind.USER_INPUT:
            of.given[node] = len(of.given)
            continue
        if not isinstance(tensors.get(name), Tensor):
            raise Undecided(f"{name} is no tensor")
        of.held[node] = spec.kind, tensors[name].detach()
        if spec.kind is InputKind.BUFFER:
            of.buffers[f"buffer {name}"] = node
    outputs = iter(_named(program.call_spec.out_spec))
    for spec in program.graph_signature.output_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind is OutputKind.USER_OUTPUT:
            name = next(outputs)
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            name = f"input {of.given[nodes[spec.target or '']]}"
        else:
            name = f"buffer {spec.target}"
        if name in of.results or name in of.numbers:
            raise Undecided(f"two results are called {name}")
        if node is not None:
            of.results[name] = node
        elif (value := getattr(spec.arg, "value", None)) is not None:
            of.numbers[name] = value
    return of


def _write_epsilons(gm: GraphModule) -> None:
    """What is left out depends on a dtype: it stays what it is when the graph is run in another."""
    for node in gm.graph.nodes:
        if "rms_norm" in str(node.target) and argument(node, "eps", 0) is None:
            wide = dtype_held(node.args[0]) is torch.float64
            epsilon = torch.finfo(torch.float64 if wide else torch.float32).eps
            node.args, node.kwargs = node.args[:3], {**node.kwargs, "eps": epsilon}


def _named(spec: Any) -> list[str]:
    """Where each output lies: in a dict, under its key."""
    names: dict[int, str] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, int):
            names[item] = f"output {path.removeprefix('.') or 0}"
        elif isinstance(item, (Mapping, list, tuple)):
            for key, each in item.items() if isinstance(item, Mapping) else enumerate(item):
                walk(each, f"{path}.{key}")

    walk(spec.unflatten(list(range(spec.num_leaves))), "")
    return [names.get(place, f"output leaf {place}") for place in range(spec.num_leaves)]


def _uniform_weights(both: Sequence[Exported]) -> Iterator[Finding]:
    """Weights that hold one number many times: nothing shows where each of its elements goes."""
    found = {
        node.name: None
        for each in both
        for node, (kind, tensor) in each.held.items()
        if kind is InputKind.PARAMETER and tensor.numel() > 1
        if bool((tensor == tensor.reshape(-1)[0]).all())
    }
    if found:
        said = (
            f"each of {', '.join(found)} holds one number only, so that an order of it, or "
            "another, is not seen"
        )
        yield Finding("weight.uniform", said, certain=False)


def _states(both: Sequence[Exported]) -> dict[Node, str]:
    """Buffers that both write: they may hold anything when they are called again, so long as both
    hold the same now.
    """
    mine, theirs = both
    return {
        of.buffers[name]: name
        for name in mine.results.keys() & mine.buffers.keys() & theirs.buffers.keys()
        if memory.same_bits(*(of.held[of.buffers[name]][1] for of in both))
        for of in both
    }


def _results(of: Exported, inputs: Inputs) -> Tensors:
    """What its graph gives. Raises Undecided where the function itself gives otherwise: what it
    does when it is traced, or when it is called again, is something else then. So it is where a
    module is left with another tensor for an attribute, of which the graph says nothing.
    """
    target, given = of.target, memory.copied(inputs)
    try:
        stays = memory.kept(target, may_rebind=False)
        with stays, torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = memory.tensors_in(target(*given))
            held = target.named_buffers() if isinstance(target, nn.Module) else ()
            run = {f"buffer {name}": value.clone() for name, value in held}
        exported = _OnTensors(of, inputs).results()
    except Undecided:
        raise
    except Exception as error:
        raise _other(of, f"result ({_first_line(error)})") from error
    run |= {f"input {place}": leaf for place, leaf in enumerate(tree_leaves(given))}
    run |= dict(zip((name for name in of.results if "output" in name), outputs, strict=False))
    for name in (name for name in of.results if name in run):
        one, other = run[name], exported[name]
        is_near = one.dtype == other.dtype and _distance(one, other, no_number=True) <= ROUNDED
        if not is_near:
            raise _other(of, name)
    return exported


def _other(of: Exported, result: str) -> Undecided:
    return Undecided(f"{of.role} gives another {result} than the graph that is exported of it")


# -- in the field


class _InField(Interpreter):
    """The values of one graph at the point that is set. A weight is known by its numbers."""

    def __init__(self, of: Exported, states: Mapping[Node, str]) -> None:
        super().__init__(of.gm, garbage_collect_values=False)
        self.of, self._states = of, states
        self.extra_traceback = False  # an error's words are a finding's
        self.run(enable_io_processing=False)
        self.marks: dict[Node, object] = {node: _mark(value) for node, value in self.env.items()}

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            return self._leaf(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "output":
            return None
        _check_function(n)
        if not isinstance(n.target, OpOverload):
            return n.target(*args, **kwargs)  # type: ignore[operator]  # a getitem
        return self._called(n, n.target, args, kwargs)

    def _leaf(self, node: Node) -> Any:
        place, value = self.of.given.get(node, len(self.of.given)), value_of(node)
        name = self._states.get(node, f"input {place}")
        if node not in self._states and node in self.of.held:
            kind, tensor = self.of.held[node]
            return _by_numbers(tensor, exactly=kind is _CONSTANT)
        if not isinstance(value, Tensor):
            return value
        if value.is_complex():
            parts = (field.random(f"{name} {part}", value.shape) for part in ("real", "imag"))
            return Complex(*parts)
        if value.numel() <= _FEW:
            return field.of_both_signs(name, value.shape, _FEW * place, POINTS)
        return field.random(name, value.shape)

    def _called(self, node: Node, target: OpOverload, args: Any, kwargs: Any) -> Any:
        held, reads = value_of(node), node.all_input_nodes
        one = held if isinstance(held, Tensor) else None
        call = operators.called(
            target,
            args,
            kwargs,
            shape=tuple(one.shape) if one is not None else None,
            dtype=one.dtype if one is not None else None,
            source=dtype_held(next(iter(reads), None)),
            masks=any(operators.is_mask(value_of(read)) for read in reads),
            holds=lambda name: dtype_held(argument(node, name)),
        )
        by_element = torch.Tag.pointwise in target.tags
        # no integer is left as it is
        if one is not None and is_cast(node) and _narrows(one, reads):
            return operators.pointwise(replace(call, name=f"as {one.dtype} holds it"))
        for way in (operators.run, *[operators.pointwise] * by_element):
            try:
                found = way(call)
                if one is None and isinstance(found, list):
                    return found
                if one is not None and tuple(found.shape) == tuple(one.shape):
                    made_here = "field" in known(call.target).row.rules and not reads
                    return _complex(found, one, known=made_here)
            except Exception:  # what has no rule for these arguments
                continue

        # no more is known than what it is made of
        def unknown(name: str, part: Tensor) -> Value:
            return _complex(
                operators.opaque(replace(call, name=name, shape=tuple(part.shape))), part
            )

        if one is not None:
            return unknown(call.name, one)
        several = enumerate(held if isinstance(held, (tuple, list)) else ())
        return [
            unknown(f"{call.name} {at}", part) for at, part in several if isinstance(part, Tensor)
        ]


def _narrows(held: Tensor, reads: Sequence[Node]) -> bool:
    """Are integers held as floats that have not all of them?"""
    given = filter(None, map(dtype_held, reads))
    return held.dtype in operators.NARROW and not all(map(is_float, given))


def _check_function(node: Node) -> None:
    """Raises Undecided for what is no function of what it reads, or whose size values say."""
    target, name = node.target, f"{node.name} ({node.target})"
    module = str(getattr(target, "__module__", ""))
    if node.op != "call_function":
        raise Undecided(f"{node.name} is another graph")
    if not isinstance(target, OpOverload) and not module.endswith("operator"):
        raise Undecided(f"{name} runs other graphs")
    if kind_of(node) is Kind.RANDOM:
        raise Undecided(f"{name} is random")
    for part in tree_leaves(value_of(node)):
        sizes = tuple(part.shape) if isinstance(part, Tensor) else (part,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            raise Undecided(f"{name} makes a size, or a plain number, of values")


def _complex(found: Value, held: Tensor, known: bool = False) -> Value:
    """Of a complex result both parts: ``known`` to be real, or functions of what is known of it."""
    if isinstance(found, Complex) or not held.is_complex():
        return found
    if known:
        return Complex(found, field.number(0).expand(found.shape))
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
    size = root * root
    sign = Num(tensor.sign().to(torch.int64).remainder(field.P))
    return size * sign


def _parts(value: Any) -> list[Num]:
    sides = (
        (leaf.real, leaf.imag) if isinstance(leaf, Complex) else (leaf,)
        for leaf in tree_leaves(value)
    )
    return [part for both in sides for part in both if isinstance(part, Num)]


def _mark(value: Any) -> object:
    """Equal for equal values of one shape."""
    parts = _parts(value)
    shape = getattr(value, "shape", None) if parts else repr(value)
    return shape, tuple(int(field.label(part).re) for part in parts)


# -- where they are not equal


def _unproved(
    runs: Sequence[_InField], names: Sequence[str], inputs: Inputs, seen: Sequence[Finding]
) -> Audit:
    one, other = runs
    parts = _parting(one, other, names), _parting(other, one, names)
    shown = _witness([run.of for run in runs], inputs, DIFFERENT)
    lines = (last_line(node.stack_trace or "") for side in parts for node in side)
    line = next(filter(None, lines), "")
    if not shown:
        said = "not decided: neither proved equal nor seen to differ in float64. They part at "
        return _undecided("graphs.part", said + _told(parts), seen, line)
    said = f"{_told_values(**shown)}. The two part at {_told(parts)}"
    found = Finding("values.differ", said, line=line)
    return Audit((), (found, *seen), False, **shown)


def _parting(run: _InField, other: _InField, names: Sequence[str]) -> list[Node]:
    """The first steps on the way to these results whose values the other graph does not have."""
    known = set(other.marks.values())
    new = {node for node, mark in run.marks.items() if mark not in known}
    first = {node for node in new if new.isdisjoint(node.all_input_nodes)}
    results = (run.of.results[name] for name in names)
    on_the_way = {*reached(results, lambda node: new.intersection(node.all_input_nodes))}
    return [node for node in run.env if node in on_the_way & first]


def _told(parts: Sequence[Sequence[Node]]) -> str:
    sides = [
        ", ".join(f"{node.name} ({node.target})" for node in side[:_MOST_PARTS]) for side in parts
    ]
    return (
        " of the function, and ".join(side or "no step of its own" for side in sides)
        + " of the reference"
    )


def _told_values(errors: Errors, draws: Sequence[str], **_: Any) -> str:
    return f"on {draws[0]}, {_largest(errors)}"


def _largest(errors: Errors) -> str:
    name = max(errors, key=errors.__getitem__)
    return f"{name} differs by {errors[name]:.2g} of its largest number, in float64"


def _witness(both: Sequence[Exported], inputs: Inputs, above: float) -> dict[str, Any]:
    """Inputs on which float64 shows a difference, and how large it is of each result, by an Audit's
    names of them; nothing where none does.

    To be called different they have to be so by far more than steps, rounded otherwise, make of
    either. Against a proof anything counts, what is no number in one alone too, but for an overflow
    of large inputs.
    """
    refutes = above == REFUTES
    for name, draw in _draws(inputs):
        try:
            runs = [_Wide(of, draw) for of in both]
            one, other = (run.results() for run in runs)
            # what is too large for float64 is no difference over the real numbers
            if any(run.overflows for run in runs) and (not refutes or name == OVERFLOWING):
                continue
            errors = {key: _distance(one[key], other[key], refutes) for key in other}
            apart = {key: error for key, error in errors.items() if error > above}
            if apart and not refutes:
                near = [_Wide(of, draw, is_rounded=True).results() for of in both]
                moved = list(zip((one, other), near, strict=True))
                for key in errors:
                    noise = sum(_distance(run[key], other_run[key]) for run, other_run in moved)
                    if errors[key] <= NOISE * noise:
                        apart.pop(key, None)
        except Exception:  # an operator that takes no float64
            continue
        if apart:
            return {"errors": errors, "draws": (name,), "witness": tuple(draw)}
    return {}


def _draws(inputs: Inputs) -> Iterator[tuple[str, list[Any]]]:
    yield "the inputs as given", list(inputs)
    for seed, size in enumerate(SIZES):
        yield f"inputs of size {size:g}", _drawn(inputs, seed, size)
    yield "zeros", _drawn(inputs, 0, 0.0)
    yield "small whole numbers", _drawn(inputs, 0, 2.0, are_whole=True)
    if not all(is_float(tensor.dtype) for tensor in memory.tensors_in(inputs)):
        yield "other bytes", _integers(inputs, most=1)
        yield "other integers", _integers(inputs)


def _drawn(inputs: Inputs, seed: int, size: float, are_whole: bool = False) -> list[Any]:
    """Floats of a size."""
    drawn = torch.Generator().manual_seed(seed)

    def draw(value: Tensor) -> Tensor:
        if value.dtype is torch.bool and size in (0.0, 2.0):  # a mask of nothing, or of all
            return torch.full_like(value, size == 2.0)
        if not value.is_floating_point():
            return value
        found = torch.randn(value.shape, generator=drawn, dtype=torch.float64) * size
        return (found.round().clamp(-size, size) if are_whole else found).to(value.dtype)

    return list(tree_map_only(Tensor, draw, inputs))


def _integers(inputs: Inputs, most: int = 8) -> list[Any]:
    """Integers of up to so many bytes, of all that they may hold: sums and products of them
    wrap.
    """
    drawn = torch.Generator().manual_seed(0)

    def draw(value: Tensor) -> Tensor:
        if is_float(value.dtype) or value.dtype.itemsize > most:
            return value
        least, largest = 0, 1
        if value.dtype is not torch.bool:  # fewer than an int64 has, of which float64 has all
            info = torch.iinfo(value.dtype)
            least, largest = max(info.min, -1 << WIDE), min(info.max, (1 << WIDE) - 1)
        return torch.randint(least, largest + 1, value.shape, generator=drawn).to(value.dtype)

    return list(tree_map_only(Tensor, draw, inputs))


class _OnTensors(Interpreter):
    """The graph on copies of these inputs, and on what it holds."""

    def __init__(self, of: Exported, inputs: Inputs) -> None:
        super().__init__(of.gm, garbage_collect_values=False)
        self.of, self._leaves = of, tree_leaves(memory.copied(inputs))

    def results(self) -> Tensors:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self.run(enable_io_processing=False)
        return {name: self.env[node] for name, node in self.of.results.items()}

    def run_node(self, n: Node) -> Any:
        if n.op != "placeholder":
            return super().run_node(n)
        return self.of.held[n][1] if n in self.of.held else self._leaves[self.of.given[n]]


class _Wide(_OnTensors):
    """Whatever is cast to a float, or made as one, is float64.

    is_rounded  each step is off in its last bits
    overflows   a number left what float64 holds
    """

    def __init__(self, of: Exported, inputs: Inputs, is_rounded: bool = False) -> None:
        super().__init__(of, inputs)
        self.overflows = False
        self._drawn = torch.Generator().manual_seed(0) if is_rounded else None

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        return self._rounded(widened(found)) if n.op == "placeholder" else found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.dtype, wide, (args, dict(kwargs)))
        found = super().call_function(target, args, kwargs)
        # of integers, or of the default dtype
        if isinstance(found, Tensor) and found.dtype == torch.float32:
            if not memory.tensors_in((args, kwargs)):
                kwargs = {**kwargs, "dtype": torch.float64}
            args, kwargs = tree_map_only(Tensor, Tensor.double, (args, kwargs))
            found = super().call_function(target, args, kwargs)
        self.overflows |= _overflow(found, (args, kwargs))
        if self._drawn is not None and known(target).kind in (Kind.ANALYTIC, Kind.RANDOM):
            return tree_map_only(Tensor, self._rounded, found)
        return found

    def _rounded(self, value: Any) -> Any:
        is_tensor = isinstance(value, Tensor) and is_float(value.dtype)
        if self._drawn is None or not is_tensor:
            return value
        off = torch.randn(value.shape, generator=self._drawn, dtype=torch.float64)
        return value * (1 + 4e-16 * off)


def _overflow(found: Any, given: Any) -> bool:
    """Is a number of what was found too large, or too small to be exact, and none of the given?"""
    floats = [leaf for leaf in tree_leaves(given) if isinstance(leaf, (float, Tensor))]
    if not all(bool(torch.as_tensor(leaf).isfinite().all()) for leaf in floats):
        return False
    least = torch.finfo(torch.float64).tiny
    return any(
        bool((part.isinf() | ((part != 0) & (part.abs() < least))).any())
        for part in memory.tensors_in(found)
        if part.is_floating_point()
    )


def _distance(one: Tensor, other: Tensor, no_number: bool = False) -> float:
    """Relative to the largest number. ``no_number``: nan or infinite in one alone is far apart."""
    if one.shape != other.shape:
        return float("inf")
    if not other.numel() or torch.equal(one, other):
        return 0.0
    kind = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float64)
    both = torch.stack((one.to(kind), other.to(kind)))
    finite = both.isfinite()
    if no_number and not torch.equal(*finite):
        return float("inf")
    one, other = both.masked_fill(~finite.all(0), 0)
    if torch.equal(one, other):
        return 0.0
    return float((one - other).abs().max() / torch.maximum(one.abs(), other.abs()).max())
