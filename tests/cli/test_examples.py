"""Every example runs as its first lines say; those for serving stacks are in tests/serving."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.exhaustive import one_in

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "audit_a_call.py": ["[tables.swapped]", "rope_cos and rope_sin are exchanged"],
    "call_the_operator.py": [
        "rows written: [0, 5, 200]",
        "refused: [dtype.cache_index]",
        "1 MlaPrologV3",
    ],
    "fuse_your_model.py": ["fused 1, left 0"],
    "hf_generate.py": [
        "optimized 2 of 2",
        "float32 tokens equal: True",
        "fused 2, left 0",
        "tokens in the cache: 13",
    ],
    "inspect_a_dump.py": [
        "MlaPrologV3: layer 0",
        "Followed from input to output, and not copied: arg9_1, arg11_1.",
        "would fuse 1, left 0",
    ],
}
ELSEWHERE = {"tensor_parallel.py", "__init__.py"}  # tests/models/test_tensor_parallel.py


def test_every_example_is_run_and_listed():
    here = {path.name for path in EXAMPLES.glob("*.py")}
    assert here - ELSEWHERE == set(EXPECTED)
    index = (EXAMPLES / "README.md").read_text()
    missing = [
        path.name
        for path in EXAMPLES.rglob("*.py")
        if path.name not in ("layer.py", "__init__.py")
        and f"]({path.relative_to(EXAMPLES)})" not in index
    ]
    assert missing == []


@pytest.mark.parametrize("name", one_in(3, sorted(EXPECTED)))
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    torch._dynamo.reset()
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for words in EXPECTED[name]:
        assert words in printed
