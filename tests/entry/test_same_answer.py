"""``mla-fusion explain`` and the backend say the same of one graph, whatever its caches are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mla_fusion.examples.fuse_your_model import HCKV, example

import mla_fusion as mf
from mla_fusion.tools import cli
from tests.exhaustive import one_in

SHAPES = {"kernel": (9, 128, 1), "rows": (9, 128), "heads first": (9, 1, 128), "flat": (9 * 128,)}
MODEL = """
import torch
from mla_fusion.examples.fuse_your_model import DR, HCKV, example


def of():
    model, arguments = example()
    caches = (torch.zeros(*{shape}, width).bfloat16() for width in (HCKV, DR))
    return model, (*arguments[:4], *caches)
"""


@pytest.mark.parametrize(
    ("shape", "dynamic"),
    one_in(1, [("kernel", False), ("rows", True), ("heads first", False), ("flat", True)]),
)
def test_explain_and_the_backend(
    shape: str, dynamic: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(shape=SHAPES[shape]))
    flags = ["--json", *(["--dynamic"] * dynamic)]
    status = cli.main(["explain", f"{file}:of", *flags])
    said = json.loads(capsys.readouterr().out)

    model, arguments = example()
    caches = (torch.zeros(*SHAPES[shape], width).bfloat16() for width in (HCKV, 64))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=mf.backend(), dynamic=dynamic or None)(*arguments[:4], *caches)
    done = mf.reports()[-1]
    wanted = [(item.cache_mode, item.placement) for item in done.fused]
    assert [(item["cache_mode"], item["placement"]) for item in said["fused"]] == wanted
    assert [item["code"] for item in said["rejected"]] == [item.code for item in done.rejected]
    assert status == (0 if done.fused and not done.rejected else 1)


def test_pass_only_judges_as_without_a_wrapper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(shape=SHAPES["rows"]))
    cli.main(["explain", f"{file}:of", "--pass-only"])
    assert "staged" in capsys.readouterr().out
