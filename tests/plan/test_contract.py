"""What the operator's contract refuses."""

from __future__ import annotations

import pytest

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.harness import refused, traced_graph


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [({}, 1152, "contract:dims.he"), ({"cann": "8.5"}, 1056, "contract:dims.he")],
)
def test_hidden_size_that_the_kernel_refuses(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, str], value: int, code: str
) -> None:
    monkeypatch.setattr(base, "HE", value)
    rejection = refused(
        traced_graph(prologues.PagedRotateHalf(), *base.paged_args()), mf.Config(**option)
    )
    assert rejection.code == code
    assert str(value) in rejection.message


def test_block_size_that_the_kernel_refuses_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_SIZE", 8)
    args = base.paged_args()
    report = mf.fuse(traced_graph(prologues.PagedRotateHalf(), *args))
    assert "the kernel refuses the caches" in report.fused[0].placement
    rejection = refused(
        traced_graph(prologues.PagedRotateHalf(), *args), mf.Config(staging="never")
    )
    assert rejection.code.startswith("contract:dims.") and "BlockSize" in rejection.message


def test_query_norm_and_rows_of_a_release_that_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "HE", 6144)
    monkeypatch.setattr(prologues, "HE", 6144)
    graph, args = prologues.WithIndexer(), base.paged_args()
    rejection = refused(traced_graph(graph, *args), mf.Config(cann="8.3", verify="off"))
    assert rejection.code == "contract:query_norm_flag" and "CANN 8.3" in rejection.message
    assert mf.fuse(traced_graph(graph, *args), mf.Config(cann="8.5", verify="off")).fused
    always = mf.Config(cann="8.3", staging="always", verify="off")  # it takes no rows by token
    rejection = refused(traced_graph(prologues.PagedRotateHalf(), *args), always)
    assert "found 'TND'; not in place: [config.staging]" in rejection.message
