"""A torch_npu without what graphs compile through: refused by name, before anything else fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import mla_fusion as mf
from mla_fusion import releases

pytestmark = pytest.mark.skipif(
    releases.refusal() is None, reason="this release is not refused: test_ways.py"
)


def test_doctor() -> None:
    code = "from mla_fusion.tools.cli import main; raise SystemExit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["check"] == "release" and problem["failed"] == releases.refusal()


def test_activate() -> None:
    with pytest.raises(releases.UnsupportedRelease, match="pip install torch=="):
        mf.offline.activate()
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize("mode", ["ge", "npugraph_ex"])
def test_lower(mode: str) -> None:
    with pytest.raises(releases.UnsupportedRelease, match="pip install torch=="):
        mf.lower(torch.relu, torch.ones(2), mode=mode)


def test_the_release_to_install_is_one_that_works() -> None:
    assert releases.for_torch(torch.__version__).works
