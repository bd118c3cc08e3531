"""No name in a dump is more than an operator of the listed namespaces, an entry of the table, or
nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fusion.compat import OpOverload, OpOverloadPacket, schema_of
from mla_fusion.tools.dumps import names
from mla_fusion.tools.dumps.fx_text import read
from tests.dumps import fuzzing

MOST = 60_000  # names that are walked
ROOTS = {"torch": torch, "torch.ops": torch.ops}


def reachable() -> list[str]:
    """Dotted names under torch and torch.ops, breadth first, as attributes that are there without
    being asked for.
    """
    found, seen, waiting = list[str](), set[int](), deque(ROOTS.items())
    while waiting and len(found) < MOST:
        prefix, owner = waiting.popleft()
        for name in sorted(
            set(dir(owner)) | set(vars(owner)) if hasattr(owner, "__dict__") else dir(owner)
        ):
            path = f"{prefix}.{name}"
            found.append(path)
            try:
                inner = vars(owner).get(name)
            except TypeError:
                inner = None
            if inner is not None and id(inner) not in seen and hasattr(inner, "__dict__"):
                seen.add(id(inner))
                waiting.append((path, inner))
    return found


def operators() -> list[str]:
    """Every operator that torch knows, and those of TorchScript, which no dispatcher guards."""
    scripted = {schema.name for schema in torch._C._jit_get_all_schemas()}
    every = {*torch._C._dispatch_get_all_op_names(), *scripted}
    return [
        f"{name.replace('::', '.')}{'' if '.' in name else '.default'}" for name in sorted(every)
    ]


def is_allowed(found: Any) -> bool:
    namespace = schema_of(found).name.partition("::")[0] if isinstance(found, OpOverload) else ""
    return (
        found is None
        or namespace in names.NAMESPACES
        or any(found is one for one in names.FUNCTIONS.values())
    )


@pytest.fixture(scope="module")
def every() -> list[str]:
    walked = reachable()
    assert len(walked) > 20_000 and "torch.os.system" in walked and "torch.hub.load" in walked
    return walked


def test_names_of_calls(every: list[str]) -> None:
    """As the reader of listings hands them on, with ``torch.ops.`` in front and without, and as
    they stand.
    """
    modules, kept = set(sys.modules), set(vars(torch))
    spelled = {
        form
        for name in every
        for form in (name, name.removeprefix("torch.ops."), name.removeprefix("torch."))
    }
    found = {name: names.target(name) for name in [*spelled, *operators()]}
    assert not [name for name, one in found.items() if not is_allowed(one)]
    assert set(sys.modules) == modules and set(vars(torch)) == kept
    calls = [name for name, one in found.items() if one is not None]
    assert len(calls) > 1000  # that nothing at all is found would hold too
    assert not [
        name
        for name in calls
        if "from_file" in name or "obfuscation" in name or "load_library" in name
    ]


def test_names_among_arguments(every: list[str]) -> None:
    modules, found = set(sys.modules), set[str]()
    for name in every:
        try:
            one = names.literal(name)
        except names.Unknown:
            continue
        assert isinstance(one, (torch.dtype, torch.layout, torch.memory_format)), name
        found.add(str(one))
    assert {"torch.bfloat16", "torch.strided", "torch.channels_last"} <= found
    assert set(sys.modules) == modules


def test_what_is_called_has_no_effect() -> None:
    """All that may be called to learn a shape: functional, not random, and no operator of
    TorchScript.
    """
    called = [
        one
        for one in map(names.target, operators())
        if isinstance(one, OpOverload) and names.pure(one)
    ]
    assert len(called) > 500
    for one in called:
        schema = schema_of(one)
        assert not schema.is_mutable and torch.Tag.nondeterministic_seeded not in one.tags
        assert not any("filename" in argument.name for argument in schema.arguments)
    assert not any(
        isinstance(one, OpOverloadPacket) for one in map(names.target, ("aten.mm", "aten.add"))
    )


def test_numbers_are_bounded() -> None:
    power, product, take = (names.FUNCTIONS[name] for name in ("pow", "mul", "getitem"))
    assert names.computable(power, (2, 10), {}) and not names.computable(power, (2, 10**9), {})
    assert names.computable(product, (3, 4), {}) and not names.computable(product, ("a", 10**9), {})
    assert not names.computable(product, ([0], 10**9), {}) and not names.computable(
        take, ("abc", 1), {}
    )
    wide, split = torch.empty(10**9, 2, device="meta"), torch.ops.aten.split.Tensor
    assert not names.computable(split, (wide, 1), {}) and names.computable(split, (wide, 10**8), {})
    assert names.computable(split, (wide, 1, 1), {}) and not names.computable(
        torch.ops.aten.unbind.int, (wide,), {}
    )
    sections = torch.ops.aten.tensor_split.sections
    assert not names.computable(sections, (torch.empty(2, device="meta"), 10**9), {})


EVIL = {
    "a shell": "x = torch.os.system('echo RAN')",
    "Python": "x = torch.builtins.exec('print(\"RAN\")')",
    "a library": "x = torch.ops.load_library('evil.so')",
    "a hub": "x = torch.hub.load('a/b', 'c')",
    "a pickle": "x = torch.load('evil.pt', weights_only=False)",
    "a module among arguments": "x = torch.ops.aten.add.Tensor(a, torch._inductor)",
    "an operator that opens a file": "x = torch.ops.aten.from_file.default('new', True, 8)",
    "an operator of TorchScript": "x = torch.ops.aten.save.default(a, 'new')",
    "a namespace of somebody": "x = torch.ops.somebody.runs.default(a)",
    "a class of torch's": 'x: "f32[1]" = self.__class__.forward',
    "a method's parts": 'x: "f32[1]" = self.forward.__func__.__globals__',
    "a large number": "n = 9 ** a\n        x = 10 ** 1000000000",
    "a long text": "x = 'a' * 20000000000",
    "a wide format": "x = '%10000000000d' % 5",
    "a tower": 'x: "Sym(9**9**9**9)" = torch.sym_max(9, 9)',
    "a tall size": 'x: "f32[9**9**9, 2]" = torch.ops.aten.neg.default(a)',
    "a sum to a power": 'x: "Sym((s0 + s1 + s2)**400)" = torch.sym_max(9, 9)',
    "many parts": "x = torch.ops.aten.zeros.default([100000000])\n        y = "
    "torch.ops.aten.unbind.int(x)",
    "a far part": 'x = torch.ops.absent.x.default(a)\n        y: "f32[1]" = x[1000000000000]',
    "a list as a key": "x = torch.ops.aten.neg.default({[1]: 2})",
    "a digit that is none": 'x: "f32[²]" = torch.ops.aten.neg.default(a)',
    "many signs": f"x = torch.ops.aten.neg.default({'-' * 900}1)",
    "many brackets": f"x = torch.ops.aten.neg.default({'[' * 90}{']' * 90})",
    "a long list": f"x = torch.ops.aten.view.default(a, [{'1,' * 20000}4])",
    "a long comment": f"# File: {'# File: a:1 in ' * 20000}",
}


def test_dumps_that_would_run_code_or_take_forever(tmp_path: Path) -> None:
    head = (
        'class G(torch.nn.Module):\n    def forward(self, a: "f32[2, 2]", s: "Sym(s0)"):\n        '
    )
    files = []
    for name, line in EVIL.items():
        files.append(tmp_path / f"{name}.txt")
        files[-1].write_text(f"{head}{line}\n        return (a,)\n")
    forms = {
        "spaces": "node {\n a" + " " * 100_000 + "x\n}\n",
        "carets": 'import ge_apis as ge\n# File "a", line 1, in '
        f"f{(' ' * 3000 + '^' * 3000) * 2}x\nx = ge.Data()\n",
        "a word": f"import ge_apis as ge\n#{'a' * 100_000}\nx = ge.NetOutput()\n",
        "a circle": 'op { name: "a" type: "TensorMove" input: "b:0" } op { name: "b" type: '
        '"TensorMove" input: "a:0" }'
        ' op { name: "n" type: "NetOutput" input: "a:0" }',
    }
    for name, text in forms.items():
        files.append(tmp_path / f"{name}.txt")
        files[-1].write_text(text)
    outcomes = fuzzing.Worker(tmp_path).outcomes(files)
    assert [one for one in outcomes if not one.harmless] == []
    assert not (tmp_path / "new").exists()


def test_a_call_of_something_else_is_read_and_never_looked_up() -> None:
    operators, _ = read('class G(torch.nn.Module):\n    def forward(self, a):\n        x = '
                        'torch.os.system("x")\n'
                        "        return (a,)\n")  # fmt: skip
    assert operators[1].type == "torch.os.system" and names.target(operators[1].type) is None
