"""Two processes over gloo: the example asserts the tokens, the test what each rank says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion.models.hf import modeling

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
LAYERS, HEADS, RANKS = 2, 4, 2


@pytest.mark.slow
@pytest.mark.exhaustive  # half a minute of three processes
def test_each_rank_fuses_its_share_and_the_tokens_are_those_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    modeling()  # transformers is imported as the project imports it
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "glm4_moe_lite" not in CONFIG_MAPPING:
        pytest.skip("the model of the example is not in this transformers")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
    ]
    done = subprocess.run(
        [*command, str(EXAMPLE)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"fused {LAYERS}, left 0") == RANKS
    assert done.stdout.count(": in place,") == RANKS * LAYERS
    # the output projection and the MLP of every layer
    said = f"heads of this rank {{{HEADS // RANKS}}}; {2 * LAYERS} all-reduces a step; tokens "
    assert done.stdout.count(said) == RANKS
    assert len(set(re.findall(r"tokens (\[.*\]), as in one process", done.stdout))) == 1
