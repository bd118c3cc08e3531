"""docs/rejections.md lists the codes that the pass gives, and its examples get them."""

import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.report.rejection import CODES
from mla_fusion.report.report import Report
from mla_fusion.report.staging import REMEDIES
from tests.exhaustive import one_in
from tests.project.pages import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("generate")


def test_the_page_is_current(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "run `make docs`"


def test_each_code_has_one_row_with_its_remedy(generator: ModuleType) -> None:
    rows = generator.page().partition("## Why a fusion is staged")[0].splitlines()
    for code, (meaning, remedy) in CODES.items():
        (row,) = (row for row in rows if row.startswith(f"| `{code}` |"))
        assert meaning.replace("|", "\\|") in row and remedy.replace("|", "\\|") in row


def test_each_reason_for_staging_has_one_row(generator: ModuleType) -> None:
    rows = generator.page().partition("## Why a fusion is staged")[2].splitlines()
    wanted = [f"| `{code}` | {remedy} |" for code, remedy in REMEDIES.items()]
    assert [row for row in rows if row.startswith("| `")] == wanted


EXAMPLES, PROLOGUE = (getattr(script("before_after"), name) for name in ("EXAMPLES", "PROLOGUE"))
RUN = [code for code, (_, after) in EXAMPLES.items() if after in PROLOGUE]


def test_each_code_has_an_example() -> None:
    assert EXAMPLES.keys() == CODES.keys()
    assert len(RUN) >= 23


@torch.library.custom_op("mla_fusion_tests::of_an_example", mutates_args=())
def my_operator(x: Tensor) -> Tensor:
    return x.clone()


@my_operator.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd, c, s = x[..., 0::2], x[..., 1::2], cos[..., :32], sin[..., :32]
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


SIZES = {"N": 2, "D": 128, "Dr": 64, "Hckv": 512, "Hcq": 1536}
SHAPES: dict[str, tuple[int, ...]] = {
    "W_dq": (1024, 1536),
    "W_q": (1024, 384),
    "W_uq_qr": (1536, 384),
    "W_dkv_kr": (1024, 576),
    "W_uk": (2, 128, 512),
    "A": (1024, 8),
    "B": (8, 1536),
    "b": (384,),
    "g_q": (1536,),
    "g_kv": (512,),
    "g_kr": (64,),
}


def explained(source: str) -> Report:
    """What the pass says of a prologue that is written as on the page."""
    module = ModuleType("as_on_the_page")
    weights = {
        name: nn.Parameter(torch.randn(shape).mul(0.03).bfloat16(), requires_grad=False)
        for name, shape in SHAPES.items()
    }
    others = {
        "g_float32": nn.Parameter(torch.randn(512), requires_grad=False),
        "eps": torch.tensor(1e-6),
    }
    functions = {"torch": torch, "F": F, "my_operator": my_operator, "rotate_pairs": rotate_pairs}
    vars(module).update({**SIZES, **weights, **others, **functions})
    exec(source, vars(module))
    shapes = (4, 1024), (4, 64), (4, 64), (4, 16, 1, 512), (4, 16, 1, 64)
    arguments = [torch.randn(shape).bfloat16() for shape in shapes]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        # where dynamo looks for the function's globals
        patch.setitem(sys.modules, module.__name__, module)
        graph, _ = capture(module.prologue, *arguments, torch.arange(4), device="cpu")
    return mf.explain(graph)


def test_the_prologue_of_the_page_fuses() -> None:
    assert [fusion.placement for fusion in explained(PROLOGUE).fused] == ["in place"]


@pytest.mark.parametrize("code", one_in(1, RUN))
def test_what_stands_before_gets_its_code(code: str) -> None:
    before, after = EXAMPLES[code]
    report = explained(PROLOGUE.replace(after, before))
    assert not report.fused and [item.code for item in report.rejected] == [code]


def test_codes_of_one_family_stand_together() -> None:
    """The page has one heading for each family."""
    families = [code.partition(".")[0] for code in CODES]
    changes = sum(left != right for left, right in itertools.pairwise(families))
    assert changes + 1 == len(set(families))


def test_every_code_in_the_source_is_listed() -> None:
    """``Departure("code", ...)`` with a code not in the table fails only when raised: find them."""
    used = {
        match
        for path in (ROOT / "mla_fusion").rglob("*.py")
        for match in re.findall(
            r'(?:Departure|Reason|Rejection)\(\s*f?"([a-z_.]+)', path.read_text()
        )
    }
    assert used and used <= set(CODES)


def test_every_code_is_in_the_source() -> None:
    """One that nobody gives would be a promise of the page."""
    source = "".join(
        path.read_text()
        for path in (ROOT / "mla_fusion").rglob("*.py")
        if path.parent.name != "report"
    )
    assert [code for code in CODES if not re.search(rf'"{re.escape(code)}[":]', source)] == []
