"""A rotation that ``torch.library.Library`` defines, on an attention of the user's own, registered
as docs/extending.md has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mla_fusion.examples.fuse_your_model import DR, HCKV, Attention, D, N, example
from torch import Tensor

import mla_fusion as mf
from tests import harness
from tests.catalogue.base import rotate_half
from tests.project.snippets import blocks

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
LIBRARY = torch.library.Library("mylib", "DEF")
LIBRARY.define("rope(Tensor x, Tensor cos, Tensor sin) -> Tensor")
LIBRARY.impl("rope", lambda x, c, s: x * c[:, None] + rotate_half(x) * s[:, None], "CPU")
torch.library.register_fake("mylib::rope", lambda x, cos, sin: x.new_empty(x.shape), lib=LIBRARY)
EXAMPLE = torch.randn(4, N, DR), torch.randn(4, DR), torch.randn(4, DR)


class Mine(Attention):
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: Tensor, kr_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = self.q_b(self.q_norm(self.q_a(x))).view(-1, N, D + DR)
        q_nope, q_pe = q.split([D, DR], dim=-1)
        query = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        c_kv, k_pe = self.kv_a(x).split([HCKV, DR], dim=-1)
        rope = torch.ops.mylib.rope
        kv_cache.view(-1, HCKV)[slots] = self.kv_norm(c_kv)
        kr_cache.view(-1, DR)[slots] = rope(k_pe.unsqueeze(1), cos, sin).squeeze(1)
        return query, rope(q_pe, cos, sin)


@pytest.fixture
def registered() -> Iterator[None]:
    (block,) = (block.text for block in blocks(PAGE) if "mylib" in block.text)
    exec(block, {"torch": torch, "mf": mf})
    yield
    mf.register_operator(torch.ops.mylib.rope, None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_fuses(registered: None, dynamic: bool) -> None:
    _, args = example()
    model = Mine().to(torch.bfloat16).eval().requires_grad_(False)
    wanted = harness.eager(model, harness.clones(args))
    found = harness.compiled(model, harness.clones(args), "mla_fusion", dynamic)
    assert harness.outcome(mf.reports()[-1]) == ("in place",), str(mf.reports()[-1])
    assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))


def test_another_rotation_is_refused_on_the_example() -> None:
    with pytest.raises(ValueError, match=r"mylib\.rope\.default, result 0"):
        mf.register_operator(
            torch.ops.mylib.rope, lambda x, c, s: torch.ops.mylib.rope(x, c, -s), *EXAMPLE
        )
