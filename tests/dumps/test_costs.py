"""What reading a dump may cost: a small listing is read, or refused with its line, in a few
seconds.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import sympy
import torch

import mla_fusion as mf
from mla_fusion.inspect import NotRebuilt, read, summarise
from mla_fusion.tools.dumps import budget, names
from mla_fusion.tools.dumps.budget import MOST_DEGREE, MOST_TERMS, measured
from tests.dumps import costly, fuzzing

HEAD = (
    'class G(torch.nn.Module):\n    def forward(self, a: "f32[2, 2]", s: "Sym(s0)", t: "Sym(s1)", '
    'x: "f32[s0, s1]"):'
)
SECONDS = 30


def listing(folder: Path, lines: list[str], head: str = HEAD) -> Path:
    file = folder / "listing.txt"
    file.write_text("\n        ".join([head, *lines, "return (a,)"]) + "\n")
    return file


def chain(form: str, count: int) -> list[str]:
    return [f"v{i} = {form.format(p=f'v{i - 1}' if i else 's')}" for i in range(count)]


def mixed(count: int) -> list[str]:
    found, last = [], "s"
    for i in range(count):
        found += [f"a{i} = {last} // t", f"b{i} = a{i} % t", f"c{i} = {last} + b{i}"]
        last = f"c{i}"
    return found


def nested(sign: str, count: int) -> str:
    size = "s0"
    for place in range(count):
        size = (
            f"Max({size}, s{place}+{place})"
            if sign == "Max"
            else f"({size} {sign} (s{place}+{place}))"
        )
    return size


LETTERS = "+".join("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
REFUSED = {
    "squares": chain("{p} * {p}", 60),
    "powers": chain("{p} ** 3", 30),
    "quotients and remainders": mixed(30),
    "maxima": [line for i in range(60) for line in (f"a{i} = {f'b{i - 1}' if i else 's'} + t",
                                                   f"b{i} = torch.sym_max(a{i}, {i})")],
    "sums in eight axes": [f'y: "f32[{", ".join([LETTERS] * 8)}]" = torch.ops.aten.foo.default(a)'],
    "a rising sum": [f"y{i} = torch.ops.aten.cat.default([{f'y{i - 1}' if i else 'x'}, "
                     "x])" for i in range(1500)],
    "convolutions": ['k: "f32[1, 1, 3]" = torch.ops.aten.foo.default(a)',
                     'c0: "f32[1, 1, s0*s1]" = torch.ops.aten.foo.default(a)']
                    + [f"c{i + 1} = torch.ops.aten.convolution.default(c{i}, k, None, [2], [1], "
                       "[1], False, [0], 1)"
                       for i in range(100)],
    "symbols": [f'y{i}: "f32[u{i}, 4]" = torch.ops.aten.nonzero.default(a)' for i in range(1500)],
    "nested annotations": [f'y{i}: "f32[{"%".join(f"(s{j}+{i}" for j in range(20))}{")" * 20}]" ='
                           " torch.ops.aten.neg.default(a)"
                           for i in range(200)],
    "nested maxima": [f'y{i}: "f32[{nested("Max", 18)}+{i}]" = '
                      'torch.ops.aten.neg.default(a)' for i in range(100)],
}  # fmt: skip
OPAQUE = {
    "a chain of products": ["y = torch.ops.aten.chain_matmul.default([" + "a," * 4000 + "])"],
    "products of lists": ["y = torch.ops.aten.linalg_multi_dot.default([" + "a," * 4000 + "])"],
    "a Cartesian product": ["y = torch.ops.aten.cartesian_prod.default([" + "a," * 1000 + "])"],
    "a mesh": ["y = torch.ops.aten.meshgrid.default([" + "a," * 1000 + "])"],
    "combinations": ['b: "f32[5]" = torch.ops.aten.foo.default(a)',
                     "y = torch.ops.aten.combinations.default(b, 2000)"],
    "an LSTM": ['h: "f32[1,1,4]" = torch.ops.aten.foo.default(a)',
                'i: "f32[1000000000,1,4]" = torch.ops.aten.foo.default(a)',
                "y = torch.ops.aten.lstm.input(i, [h,h], [h,h,h,h], True, 1, 0.0, False, False, "
                "False)"],
    "a huge repeat": ["y = torch.ops.aten.repeat.default(a, [9223372036854775807, "
                      "9223372036854775807])"],
    "a long join": ["y = torch.ops.aten.cat.default([" + "x," * 2000 + "])"],
    "one root of another": ["v = torch.ops.aten.mm.default(a, a)"]
                                + [f"p{i} = torch.ops.aten.rsqrt.default("
                                   f"{f'p{i - 1}' if i else 'v'})"
                                   for i in range(1500)],
    "products in one join": [f"v{i} = torch.ops.aten.mm.default(a, a)" for i in range(900)]
                            + ["c = torch.ops.aten.cat.default(["
                               + ", ".join(f"v{i}" for i in range(900)) + "])"],
}  # fmt: skip


@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED)
def test_what_grows_is_refused_with_its_line(lines: list[str], tmp_path: Path) -> None:
    file, started = listing(tmp_path, lines), process_time()
    with pytest.raises(NotRebuilt, match=r"^line [1-9]\d*: too costly to read: .* \d"):
        mf.explain(file)
    assert process_time() - started < SECONDS


def test_inspect_says_what_was_too_costly(tmp_path: Path) -> None:
    assert "too costly" in str(summarise(read(listing(tmp_path, REFUSED["squares"]))))


@pytest.mark.parametrize("lines", OPAQUE.values(), ids=OPAQUE)
def test_what_nobody_needs_is_left_alone(
    lines: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = process_time()
    with caplog.at_level(logging.DEBUG, "mla_fusion"):
        assert not mf.explain(listing(tmp_path, lines)).fused
    assert process_time() - started < SECONDS
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_many_symbols_cost_in_proportion(tmp_path: Path) -> None:
    """Of a live graph, in which nothing is counted: 400 symbols took 12 times as long as 100."""

    def seconds(count: int) -> float:
        inputs = "".join(f', x{i}: "f32[u{i}, 4]"' for i in range(count))
        lines = [f'y{i}: "f32[u{i}, 4]" = torch.ops.aten.mm.default(x{i}, w)' for i in range(count)]
        head = (
            'class G(torch.nn.Module):\n    def forward(self, a: "f32[4]", w: "f32[4, '
            f'4]"{inputs}):'
        )
        from mla_fusion.tools.dumps import rebuild_fx

        gm, _ = rebuild_fx.Rebuilder(read(listing(tmp_path, lines, head))).graph_module()
        started = process_time()
        mf.explain(gm)
        return process_time() - started

    seconds(20)
    assert seconds(200) < 8 * seconds(50) + 0.3


def test_nothing_of_torch_s_logging_comes_through(tmp_path: Path) -> None:
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        lines = [*OPAQUE["a huge repeat"], "z = torch.ops.aten.view.default(a, [3, 5])"]
        mf.explain(listing(tmp_path, lines))
        assert told == []
        logger.error("of somebody else")
        assert len(told) == 1
    finally:
        logger.removeHandler(handler)


def test_terms_and_degrees() -> None:
    a, b, c = sympy.symbols("a b c", positive=True, integer=True)
    assert (
        measured(sympy.Integer(7)) == (1, 0)
        and measured(a) == (1, 1)
        and measured(a * b + c) == (2, 2)
    )
    assert measured((a + b) ** 3) == (4, 3) and measured((a + b) * (a + c)) == (4, 2)
    assert measured(sympy.Max(a + b, c))[0] == 6
    assert measured(a**1000)[1] > MOST_DEGREE and measured((a + b + c) ** 40)[0] > MOST_TERMS
    assert measured(sympy.Pow(a, b, evaluate=False))[0] > MOST_TERMS


def test_operators_that_unroll_are_not_called() -> None:
    tensor = torch.empty(4, 4, device="meta")
    unrolled = (
        "chain_matmul.default",
        "lstm.input",
        "combinations.default",
        "cartesian_prod.default",
    )
    assert not [
        name for name in unrolled if names.computable(names.target(f"aten.{name}"), ([tensor],), {})
    ]
    cat, mesh = names.target("aten.cat.default"), names.target("aten.meshgrid.default")
    assert names.computable(cat, ([tensor] * 1000,), {}) and not names.computable(
        mesh, ([tensor] * 1000,), {}
    )
    assert not names.computable(
        names.target("aten.neg.default"), (torch.empty([1] * 65, device="meta"),), {}
    )


@contextmanager
def alarmed(seconds: float, handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError, SystemExit])
def test_an_interrupt_is_no_refusal(kind: type[BaseException]) -> None:
    """Torch's C++ makes a TypeError of what Python raises below it; a time limit may be an
    Exception.
    """

    def refused(*_: object) -> None:
        raise TypeError(
            "empty(): argument 'size' failed to unpack the object with error "
            f'"{kind.__name__}: now"'
        )

    def late(*_: object) -> None:
        raise kind("now")

    mode = torch.device("meta")
    for call in (refused, late):
        with pytest.raises(kind):
            budget.called(mode, call, (), {})  # type: ignore[arg-type]
    with pytest.raises(budget.Refused):
        budget.called(mode, torch.ops.aten.mm.default, (torch.empty(2), torch.empty(2)), {})  # type: ignore[arg-type]


def test_an_interrupt_ends_the_reading(tmp_path: Path) -> None:
    """One that comes while Python runs a finalizer is lost: the next is not."""
    file = listing(tmp_path, REFUSED["a rising sum"])
    interrupts = []

    def interrupt(*_: object) -> None:
        interrupts.append(None)
        raise KeyboardInterrupt

    with alarmed(0.3, interrupt), pytest.raises(KeyboardInterrupt):
        while len(interrupts) < 9:
            with pytest.raises(NotRebuilt):
                mf.explain(file)


@pytest.mark.exhaustive
def test_costly_mutations_are_harmless(tmp_path: Path) -> None:
    """A sample; ``benchmarks/fuzz_dumps.py`` draws them among the others."""
    import random

    contents = fuzzing.fixtures()
    files = []
    for number in range(4):
        draw = random.Random(f"costs {number}")
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_bytes(costly.mutated(contents["fx_before.txt"], draw))
    assert [one for one in fuzzing.Worker(tmp_path).outcomes(files) if not one.harmless] == []
