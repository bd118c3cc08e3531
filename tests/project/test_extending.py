"""docs/extending.md to the letter, in a scratch copy: each step edits a file the page names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
COPIED = ("mla_fusion", "meta", "converters", "tests", "docs", "pyproject.toml", "README.md")


class Scratch:
    """A copy of the project whose code is imported in place of the installed one."""

    def __init__(self, at: Path) -> None:
        self.root = at
        for name in COPIED:
            source = ROOT / name
            kept = shutil.ignore_patterns("fixtures", "assets")
            if source.is_dir():
                shutil.copytree(source, at / name, ignore=kept)
            else:
                shutil.copy(source, at / name)
        for part in ("meta", "converters"):  # where an installation has them
            (at / "mla_fusion" / part).symlink_to(at / part)

    def edit(self, section: str, file: str, before: str, after: str) -> None:
        """Replace the one ``before`` in a file, which the section of the page must name."""
        text = re.split(r"^## ", PAGE, flags=re.MULTILINE)
        named = next(part for part in text if part.startswith(section))
        assert file in named, f"'{section}' does not send anybody to {file}"
        path = self.root / file
        held = path.read_text()
        assert held.count(before) == 1, f"{before!r} stands {held.count(before)} times in {file}"
        path.write_text(held.replace(before, after))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        environment = {
            name: value for name, value in environment.items() if not name.startswith("PYTEST_")
        }
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def tests(self, *which: str) -> str:
        """The last line of pytest."""
        done = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *which)
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path)


SPELLING = """
class HypotNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        high = x.float()
        length = torch.linalg.vector_norm(high, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        root = torch.hypot(length, length.new_full((), 0.001))
        return (high / root).to(x.dtype) * self.weight


@entry("in place", source="written for this project", tags="whole, symbolic, device", slack=1.1)
class ByHypot(PagedRotateHalf):
    norm = HypotNorm
"""


@pytest.mark.exhaustive
def test_a_spelling_that_needs_an_operator(scratch: Scratch) -> None:
    section = "A spelling that is not recognised"
    first = "class FlatCaches(PagedRotateHalf):"
    scratch.edit(
        section, "tests/catalogue/prologues.py", first, SPELLING.strip() + "\n\n\n" + first
    )
    which = ("tests/fusion/test_catalogue.py", "-m", "", "-k", "ByHypot")
    assert "failed" in scratch.tests(*which)
    (rule,) = re.findall(r"^@operator\(.*?(?=^```)", PAGE, flags=re.MULTILINE | re.DOTALL)
    (call,) = re.findall(r"^hypot\.default\(.*\n", PAGE, flags=re.MULTILINE)
    for file, before, new in (
        ("mla_fusion/graph/arithmetic.py", '@operator("pow", "float_power")\n', f"{rule}\n\n"),
        ("tests/graph/calls.txt", "add.Tensor(x, y)\n", call),
    ):
        scratch.edit("An operator", file, before, new + before)
    after = scratch.tests(*which)
    assert "passed" in after and "failed" not in after, after
    rules = scratch.tests("tests/graph/test_rules.py", "-m", "", "-k", "hypot or every_rule")
    assert "2 passed" in rules and "failed" not in rules, rules


EXAMPLE = """@miss("heads.three", tags="absorb")
class ThreeHeads(Base):
    def __init__(self) -> None:
        super().__init__(heads=3)
"""


@pytest.mark.exhaustive  # as the spelling above: pytest in a copy of the project
def test_a_rejection_code(scratch: Scratch) -> None:
    section = "A rejection code"
    code = (
        '    "heads.three": (\n        "There are three heads.",\n        "Take another number of '
        'them.",\n    ),\n'
    )
    next_code = '    "reader.latent": (\n'
    scratch.edit(section, "mla_fusion/report/rejection.py", next_code, code + next_code)
    first = "    region = list(region)\n"
    rule = """    weight = proposal.arguments["weight_uk"]
    if weight.shape[0] == 3:
        raise Departure("heads.three", f"W_uk is {list(weight.shape)}", proposal.products)
"""
    scratch.edit(section, "mla_fusion/plan/policy.py", first, rule + first)
    first = '@miss("absorb.absent", tags="absorb")'
    scratch.edit(section, "tests/catalogue/misses_products.py", first, EXAMPLE + "\n\n" + first)
    example = '    "heads.three": ("N = 3", "N = 4"),\n'
    next_example = '    "reader.latent": ('
    scratch.edit(section, "docs/before_after.py", next_example, example + next_example)
    assert scratch.run("docs/generate.py", "--check").returncode == 1
    assert scratch.run("docs/generate.py").returncode == 0
    assert "| `N = 3`<br>`N = 4` |" in (scratch.root / "docs/rejections.md").read_text()
    result = scratch.tests("tests/fusion/test_catalogue.py", "-m", "", "-k", "ThreeHeads")
    assert "passed" in result and "failed" not in result, result


CALL = """
import torch, mla_fusion as mf
from mla_fusion import meta
from mla_fusion.meta.prolog import V3
from mla_fusion.tools.selftest.samples import sample_call
dims = dict(He=1024, Hcq=1536, N=8, D=128, Dr=64, Hckv=512, BlockNum=2, BlockSize=16, Nkv=1)
call = sample_call(dims=dims, lead=(3,))
meta.check("npu_mla_prolog_v3_functional", **call, fast_mode=1)
prolog = torch.ops.npu.npu_mla_prolog_v3_functional
plain, fast = (prolog(**call, fast_mode=mode) for mode in (0, 1))
assert torch.equal(fast[0], 2 * plain[0]), "the kernel takes it"
assert V3.ge_attributes["fast_mode"] == "Int" and V3.defaults["fast_mode"] == 0
"""


@pytest.mark.exhaustive
def test_an_argument_of_the_operator(scratch: Scratch) -> None:
    section = "A version of the operator"
    before = "float kc_scale=1.0, "
    scratch.edit(section, "meta/prolog.py", before, before + "int fast_mode=0, ")
    kernel = "mla_fusion/reference/prolog.py"
    result = "query.contiguous().view(*lead, n, hckv)"
    scratch.edit(section, kernel, result, result + " * (1 + call.fast_mode)")
    done = scratch.run("-c", CALL)
    assert done.returncode == 0, done.stderr
    assert scratch.run("docs/generate_operator.py").returncode == 0


RELEASE = """
from mla_fusion.meta import limits
assert 9999 in limits("npu_mla_prolog_v3", "A3", "9.2").dims["He"]
assert 9999 not in limits("npu_mla_prolog_v3", "A3", "9.1").dims["He"]
assert 9999 in limits("npu_mla_prolog_v3", "A3").dims["He"], "latest holds what came before it"
"""


@pytest.mark.exhaustive
def test_a_release_of_cann(scratch: Scratch) -> None:
    section = "A version of the operator"
    scratch.edit(
        section, "mla_fusion/machine.py", '"9.1", "latest")\n', '"9.1", "9.2", "latest")\n'
    )
    row = "8.2     A2,A3,A5  v1,v2,v3  eager,graph  Hcq        1536\n"
    new = row.replace("Hcq ", "He  ").replace("1536", "9999").replace("8.2", "9.2")
    scratch.edit(section, "meta/limits.py", row, new + row)
    done = scratch.run("-c", RELEASE)
    assert done.returncode == 0, done.stderr


FILES = re.findall(r"`((?:mla_fusion|meta|converters|tests|benchmarks|docs)/[\w./]+)`", PAGE)


@pytest.mark.parametrize("file", sorted(set(FILES)))
def test_every_file_that_the_page_names_exists(file: str) -> None:
    assert (ROOT / file).exists()


NAMES = re.findall(r"`(_?[A-Z][A-Z_]+)` (?:of|in) `([\w/]+\.py)`", PAGE)


@pytest.mark.parametrize("name, file", sorted(set(NAMES)))
def test_every_table_that_the_page_names_stands_there(name: str, file: str) -> None:
    assert re.search(rf"^{name}\b|\bas {name}$", (ROOT / file).read_text(), re.MULTILINE)
