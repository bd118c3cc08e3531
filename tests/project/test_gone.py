"""Names that are gone raise one sentence with what to write instead."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mla_fusion as mf
from mla_fusion._gone import GONE
from mla_fusion.tools import cli

CALLS = re.compile(r"(\w+)\((\w+)=\)")


@pytest.mark.parametrize("name", [name for name in GONE if CALLS.fullmatch(name)])
def test_options_of_functions(name: str) -> None:
    function, option = CALLS.fullmatch(name).groups()  # type: ignore[union-attr]
    with pytest.raises(TypeError) as raised:
        getattr(mf, function)(**{option: 1})
    assert str(raised.value) == f"{name} is gone: {GONE[name]}"


@pytest.mark.parametrize("name", [name for name in GONE if name.startswith("mla-fusion ")])
def test_commands_and_their_options(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DUMP").touch()
    words = name.split()[1:]
    assert cli.main([*words, "model.py:example"]) == 2
    assert f"{name} is gone: {GONE[name]}\n" in capsys.readouterr().err


def test_the_variable() -> None:
    code = "import os; os.environ['MLA_FUSION_GRAPHS'] = 'out'; import mla_fusion"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"MLA_FUSION_GRAPHS is gone: {GONE['MLA_FUSION_GRAPHS']}" in done.stderr
