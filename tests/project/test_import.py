"""What ``import mla_fusion`` costs and offers."""

import json
import os
import subprocess
import sys
import textwrap
from functools import cache
from importlib import metadata

import pytest

import mla_fusion
from mla_fusion._lazy import LIGHT
from tests.exhaustive import one_in

HEAVY = (
    "torch_npu torchair npugraph_ex transformers jinja2 sympy elftools torch._dynamo "
    "torch._inductor"
).split()
LISTING = "import json, sys; print(json.dumps(sorted(sys.modules)))"


@cache
def modules_after(statement: str) -> frozenset[str]:
    """The modules loaded in a fresh interpreter after a statement, torch's backend autoload off."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{LISTING}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(json.loads(done.stdout))


def test_import_adds_nothing_heavy_to_torch() -> None:
    added = modules_after("import mla_fusion, torch") - modules_after("import torch")
    found = sorted(
        name
        for name in added
        if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)
    )
    assert not found


def test_import_loads_only_a_few_modules_of_its_own() -> None:
    """The operators' tables among them, of which the schemas are made, once torch is there."""
    own = {
        name
        for name in modules_after("import mla_fusion, torch")
        if name.split(".")[0] == "mla_fusion"
    }
    beside_tables = {name for name in own if name.split(".")[1:2] != ["meta"]}
    wanted = "_autoload _lazy machine compat ops".split()
    assert beside_tables == {"mla_fusion", *(f"mla_fusion.{part}" for part in wanted)}


WRONG = "mla_fusion.cli.main([{}])"
CALLS = (
    "'--help'", "'explain'", "'explain', 'absent.py:f'", "'explain', 'absent.txt'",
    "'lower', 'a.py:b', '--mode', 'e'",
    "'inspect', 'absent'", "'diff', 'a', 'b'", "'check-model', 'absent'",
    "'explain', 'm:f', '--soc', 'H100'", "'fly'",
)  # fmt: skip


def test_help_and_wrong_calls_need_no_torch() -> None:
    """Nor do the modules that say so of themselves."""
    calls = "".join(
        f"\ntry: assert {WRONG.format(call)} == 2\nexcept SystemExit: pass" for call in CALLS
    )
    light = ", ".join(sorted(LIGHT))
    script = (
        f"import contextlib, io, mla_fusion.cli, {light}\nwith "
        "contextlib.redirect_stdout(io.StringIO()):\n"
    )
    loaded = modules_after(script + textwrap.indent(calls.strip(), "  ") + "\npass")
    assert "mla_fusion.cli" in loaded and not {"torch", "mla_fusion.ops"} & loaded


def test_whoever_imports_torch_has_the_operators() -> None:
    """Behind this package, however torch is looked for; and by way of a module that needs it."""
    looked_for = (
        "import importlib.util, mla_fusion; importlib.util.find_spec('torch'); import torch"
    )
    for statement in (
        f"{looked_for}; torch.ops.npu.npu_mla_prolog_v3.default",
        "from mla_fusion.meta import check",
    ):
        assert "mla_fusion.ops" in modules_after(statement)


@pytest.mark.exhaustive
def test_torch_before_2_7_is_refused_with_the_pair_to_install() -> None:
    code = "import torch; del torch.float8_e8m0fnu; torch.__version__ = '2.6.0'; import mla_fusion"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    said = done.stderr.splitlines()[-1]
    assert (
        "ImportError: mla_fusion needs torch 2.7 or newer, and torch 2.6.0 is installed: "
        "pip install torch==" in said
    )


@pytest.mark.parametrize("name", mla_fusion.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(mla_fusion, name) is not None
    assert name in dir(mla_fusion)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fuze'"):
        _ = mla_fusion.fuze


def test_version_is_the_installed_one() -> None:
    assert mla_fusion.__version__ == metadata.version("mla-fusion")


def test_entry_points_load() -> None:
    (backend,) = metadata.entry_points(group="torch_dynamo_backends", name="mla_fusion")
    assert callable(backend.load())
    (script,) = metadata.entry_points(group="console_scripts", name="mla-fusion")
    assert callable(script.load())


@pytest.mark.parametrize("name", one_in(2, ["ops", "meta", "compat", "report.report"]))
def test_a_module_that_the_operators_need_is_loaded_once(name: str) -> None:
    """Whichever is imported first: the operators, which come with torch, hold the same module."""
    code = (
        f"import mla_fusion.{name} as first, sys, mla_fusion.ops\n"
        f"assert sys.modules['mla_fusion.{name}'] is first and "
        "first.__spec__.origin.endswith('.py')\n"
        "from mla_fusion import ops, compat\n"
        "assert ops.compat is compat and len(ops._libraries) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
