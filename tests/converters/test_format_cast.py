"""npu_format_cast in a GE graph leaves no node: GE casts formats itself."""

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base, prologues

UNTOUCHED = mf.Config(enable=False)


@pytest.mark.parametrize("acl_format", [2, 29])
def test_format_cast_hands_its_input_through(acl_format: int) -> None:
    x, weight = torch.empty(8, 32, device="meta"), torch.empty(32, 16, device="meta")

    def cast(x: Tensor, weight: Tensor) -> Tensor:
        return x @ torch.ops.npu.npu_format_cast(weight, acl_format)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    assert mf.lower(cast, x, weight, config=UNTOUCHED).ge_ops == mf.lower(plain, x, weight).ge_ops


def test_weights_packed_inside_the_graph_lower_to_ge() -> None:
    """The pass-only hook cannot pack outside: it emits slices and format casts for GE to fold."""
    torch.manual_seed(0)
    lowered = mf.lower(prologues.PagedRotateHalf(), *base.paged_args(), hook=True)
    assert lowered.fx_ops["npu.npu_format_cast.default"] == 3
    assert lowered.ge_ops["MlaPrologV3"] == 1
    assert not any("FormatCast" in name or name == "TransData" for name in lowered.ge_ops)
