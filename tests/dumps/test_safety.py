"""A dump is data: what it names is neither imported nor called, and it cannot take forever."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compat import OpOverload, schema_of, withdraw
from mla_fusion.inspect import DumpError, NotRebuilt, read, summarise
from mla_fusion.tools.dumps import names, rebuild_fx

FX = """\
class G(torch.nn.Module):
    def forward(self, a: "f32[2, 2]", s: "Sym(s0)"{given}):
        {line}
        return (a,)
"""
PYTHON = "import ge_apis as ge\n{line}\nn = ge.NetOutput()\n"
# Each names a module that leaves a mark when it is imported, a function of torch's or an operator
# that leaves one when it is called.
EVIL = {
    "a function": "x = torch.trap(a)",
    "a function with a shape": 'x: "f32[2, 2]" = torch.trap(a)',
    "an operator of somebody": 'x: "f32[2, 2]" = torch.ops.mla_trap.runs.default(a)',
    "an operator of no namespace": 'x: "f32[2, 2]" = mla_trap.runs.default(a)',
    "a module": 'x: "f32[2, 2]" = trap_module.run(a)',
    "an import": "import trap_module",
    "an import by name": "x = __import__('trap_module')",
    "a call among arguments": "x = torch.ops.aten.add.Tensor(a, torch.trap())",
    "a name among arguments": 'x: "f32[2, 2]" = torch.ops.aten.add.Tensor(a, torch.trap)',
    "a tensor of a call": "x = torch.ops.aten.add.Tensor(a, tensor(torch.trap()))",
    "an attribute": 'x: "f32[1]" = self.forward.__func__.__globals__',
    "a subscript": "x = a[torch.trap()]",
    "an operator's attribute": 'x: "f32[2]" = torch.ops.aten.__class__.__call__(a)',
    "a comprehension": "x = [torch.trap() for _ in a]",
    "a lambda": "x = (lambda: torch.trap())()",
    "a decorator": "@torch.trap\n        def f(): pass",
    "an f-string": "x = f'{torch.trap()}'",
    "an annotation": "x: torch.trap() = a",
    "an annotation's text": 'x: "f32[torch.trap()]" = torch.ops.aten.neg.default(a)',
    "a size": 'x: "Sym(trap())" = torch.sym_max(s, 1)',
    "a size's attribute": 'x: "Sym(s0.trap())" = torch.sym_max(s, 1)',
    "a file": "x = torch.ops.aten.from_file.default('trap_file', True, 8)",
    "a file of TorchScript": "x = torch.ops.aten.save.default(a, 'trap_file')",
    "a library": "x = torch.ops.load_library('trap_module.py')",
    "a pickle": "x = torch.load('trap_file', weights_only=False)",
}
# What could take forever, or all memory.
COSTLY = {
    "a tower": 'x: "Sym(9**9**9**9)" = torch.sym_max(s, 9)',
    "a tall size": 'x: "f32[9**9**9, 2]" = torch.ops.aten.neg.default(a)',
    "a sum to a power": 'x: "Sym((s0 + s1 + s2)**400)" = torch.sym_max(s, 9)',
    "a symbol to a power": 'x: "Sym(s0**400000000)" = torch.sym_max(s, 9)',
    "a power": "x = 10 ** 1000000000",
    "a power of a value": "x = 10 ** s\n        y = x ** x",
    "a long text": "x = 'a' * 20000000000",
    "a long text by a value": "x = 'a' * s",
    "a wide format": "x = '%10000000000d' % 5",
    "numbers that double": "x = s * 0\n        "
    + "\n        ".join(f"x{n} = x{n - 1 if n else ''} * x{n - 1 if n else ''}" for n in range(60)),
    "sizes that double": "x0 = s + 1\n        "
    + "\n        ".join(f"x{n} = (x{n - 1} + s) * x{n - 1}" for n in range(1, 12)),
    "many parts": "x = torch.ops.aten.zeros.default([100000000])\n        "
    "y = torch.ops.aten.unbind.int(x)",
    "a far part": 'x = torch.ops.absent.x.default(a)\n        y: "f32[1]" = x[1000000000000]',
    "a large tensor": 'x: "f32[1000000000000, 8]" = torch.ops.aten.zeros.default([4])',
    "many signs": f"x = torch.ops.aten.neg.default({'-' * 900}1)",
    "many brackets": f"x = torch.ops.aten.neg.default({'[' * 90}{']' * 90})",
    "a long list": f"x = torch.ops.aten.view.default(a, [{'1,' * 20000}4])",
    "a long comment": f"# File: {'# File: a:1 in ' * 20000}",
    "a list as a key": "x = torch.ops.aten.neg.default({[1]: 2})",
    "a digit that is none": 'x: "f32[²]" = torch.ops.aten.neg.default(a)',
}


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """Marks that something ran: a module on the path, a function in torch, an operator."""
    ran: list[str] = []
    monkeypatch.setattr(torch, "trap", lambda *given: ran.append("torch.trap"), raising=False)
    library = torch.library.Library("mla_trap", "DEF")
    library.define("runs(Tensor x) -> Tensor")
    for key in ("CPU", "Meta"):
        library.impl("runs", lambda x: ran.append("operator") or x, key)
    (tmp_path / "trap_module.py").write_text("run = print\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield SimpleNamespace(
        all=lambda: [*ran, *{"trap_module"} & {*sys.modules}, *tmp_path.glob("trap_file")]
    )
    withdraw(library)


def look_at(file: Path) -> None:
    """All that a user can do with a dump. A refusal is one line."""
    for look in (lambda: str(summarise(read(file))), lambda: str(mf.explain(file))):
        try:
            look()
        except (DumpError, NotRebuilt) as error:
            assert "\n" not in str(error)


def test_the_traps_catch(traps):
    torch.trap()
    torch.ops.mla_trap.runs.default(torch.zeros(2))
    __import__("trap_module")
    assert set(traps.all()) == {"torch.trap", "operator", "trap_module"}
    del sys.modules["trap_module"]


@pytest.mark.parametrize("name", EVIL)
def test_nothing_that_a_dump_names_runs(name, traps, tmp_path):
    file = tmp_path / "graph.txt"
    for text in (
        FX.format(line=EVIL[name], given=""),
        FX.format(line="pass", given=", b=torch.trap(), c: torch.trap() = 1"),
        PYTHON.format(line=EVIL[name].lstrip().replace("\n        ", "\n")),
    ):
        file.write_text(text)
        look_at(file)
        assert traps.all() == []


@pytest.mark.parametrize("name", COSTLY)
def test_no_line_takes_forever(name, tmp_path, monkeypatch):
    monkeypatch.setattr(rebuild_fx, "MOST_SECONDS", 5)
    (file := tmp_path / "graph.txt").write_text(FX.format(line=COSTLY[name], given=""))
    look_at(file)


@pytest.mark.parametrize(
    "text",
    [
        "node {\n a" + " " * 100_000 + "x\n}\n",
        f"import ge_apis as ge\n#{'a' * 100_000}\nx = ge.NetOutput()\n",
        "op { " * 100_000,
    ],
)
def test_no_text_takes_forever(text, tmp_path):
    (file := tmp_path / "graph.txt").write_text(text)
    look_at(file)


def test_the_time_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(rebuild_fx, "MOST_SECONDS", 0)
    file = Path(__file__).parent / "fixtures" / "fx_before.txt"
    with pytest.raises(NotRebuilt, match="did not get through the graph in 0 s"):
        mf.explain(file)


def test_the_list_of_names():
    """Every operator that torch knows, those of TorchScript, and functions of torch's."""
    scripted = {schema.name for schema in torch._C._jit_get_all_schemas()}
    every = {*torch._C._dispatch_get_all_op_names(), *scripted}
    asked = [
        f"{name.replace('::', '.')}{'' if '.' in name else '.default'}" for name in sorted(every)
    ]
    asked += [f"{prefix}{name}" for name in dir(torch) for prefix in ("", "torch.")]
    found = {name: one for name in asked if (one := names.target(name)) is not None}
    assert len(found) > 1000
    for name, one in found.items():
        if one not in names.FUNCTIONS.values():
            assert isinstance(one, OpOverload), name
            assert schema_of(one).name.partition("::")[0] in names.NAMESPACES, name
            assert not {given.name for given in schema_of(one).arguments} & {"filename", "fd"}, name


def test_operators_are_those_that_are_there_now():
    """torch_npu may be loaded after the first dump was read, and defines its operators anew."""
    found = []
    for _ in range(2):
        library = torch.library.Library("atb", "FRAGMENT")
        library.define("moved_by_a_test(Tensor x) -> Tensor")
        found.append(names.target("atb.moved_by_a_test.default"))
        assert found[-1] is torch.ops.atb.moved_by_a_test.default
        withdraw(library)
        if hasattr(torch.ops.atb, "moved_by_a_test"):
            delattr(torch.ops.atb, "moved_by_a_test")
    assert found[0] is not found[1] and names.target("atb.moved_by_a_test.default") is None
