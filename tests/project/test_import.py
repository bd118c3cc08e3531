"""What ``import mla_fusion`` costs and offers."""

import ast
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mla_fusion

HEAVY = "torch_npu torchair npugraph_ex transformers jinja2 sympy elftools torch._dynamo torch._inductor".split()
LISTING = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def modules_after(statement: str) -> set[str]:
    """The modules loaded in a fresh interpreter after a statement, torch's backend autoload off."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; {LISTING}"], env=environment, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_import_adds_nothing_heavy_to_torch() -> None:
    added = modules_after("import mla_fusion") - modules_after("import torch")
    found = sorted(name for name in added if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY))
    assert not found


def test_import_loads_only_a_few_modules_of_its_own() -> None:
    """The operators' tables among them, of which the schemas are made."""
    own = {name for name in modules_after("import mla_fusion") if name.split(".")[0] == "mla_fusion"}
    beside_tables = {name for name in own if name.split(".")[1:2] != ["meta"]}
    assert beside_tables == {"mla_fusion", "mla_fusion._autoload", "mla_fusion.compat", "mla_fusion.ops"}


def test_torch_before_2_7_is_refused_with_the_pair_to_install() -> None:
    code = "import torch; del torch.float8_e8m0fnu; torch.__version__ = '2.6.0'; import mla_fusion"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert "ImportError: mla_fusion needs torch 2.7 or newer, and torch 2.6.0 is installed: pip install torch==" in said


@pytest.mark.parametrize("name", mla_fusion.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(mla_fusion, name) is not None
    assert name in dir(mla_fusion)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fuze'"):
        _ = mla_fusion.fuze


def test_type_checkers_see_every_public_name() -> None:
    """The names under TYPE_CHECKING are those that ``__getattr__`` serves."""
    source = ast.parse(Path(mla_fusion.__file__ or "").read_text())
    block = next(
        node
        for node in source.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(mla_fusion.__all__)


def test_version_is_the_installed_one() -> None:
    assert mla_fusion.__version__ == metadata.version("mla-fusion")


def test_entry_points_load() -> None:
    (backend,) = metadata.entry_points(group="torch_dynamo_backends", name="mla_fusion")
    assert callable(backend.load())
    (script,) = metadata.entry_points(group="console_scripts", name="mla-fusion")
    assert callable(script.load())
