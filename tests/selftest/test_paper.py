"""Outcomes that somebody has sent: one is judged, two are compared, anything else is refused in
words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_fusion.tools.cli import main
from mla_fusion.tools.selftest import paper


def row(
    name: str, passed: bool = True, milliseconds: float | None = 1.0, through: str = "eager"
) -> dict[str, Any]:
    failures = [] if passed else ["query: too many elements differ"]
    return {
        "name": name,
        "through": through,
        "passed": passed,
        "failures": failures,
        "milliseconds": milliseconds,
    }


def outcome(path: Path, *rows: dict[str, Any], cann: str = "9.1") -> Path:
    device = {"kind": "npu", "name": "Ascend910_93", "soc": "A3", "cann": cann}
    path.write_text(
        json.dumps({"device": device, "versions": {"torch_npu": "2.10.0"}, "results": list(rows)})
    )
    return path


def test_one_outcome_shows_failures_first(tmp_path: Path) -> None:
    found = paper.read(outcome(tmp_path / "a.json", row("w0 kv0"), row("w2 kv1", passed=False)))
    assert not found.ok and found.counts == ((1, 1),)
    text = str(found)
    assert text.index("w2 kv1") < text.index("w0 kv0")
    assert "FAILED w2 kv1 (eager): query: too many elements differ" in text


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (row("s"), row("s"), "same"),
        (row("s"), row("s", passed=False), "fails now"),
        (row("s", passed=False), row("s"), "passes now"),
        (row("s", passed=False), row("s", passed=False), "fails in both"),
        (row("s"), row("s", milliseconds=2.0), "2.00 times the time"),
        (row("s"), row("s", milliseconds=1.1), "same"),
        (row("s", milliseconds=None), row("s"), "same"),
    ],
)
def test_two_outcomes(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], verdict: str
) -> None:
    found = paper.read(outcome(tmp_path / "a.json", first), outcome(tmp_path / "b.json", second))
    assert [line.verdict for line in found.lines] == [verdict]
    assert ("no check differs" in str(found)) is (verdict == "same")


def test_checks_of_one_outcome_alone_and_other_software(tmp_path: Path) -> None:
    a = outcome(tmp_path / "a.json", row("s"), row("t"))
    b = outcome(tmp_path / "b.json", row("s"), row("u"), cann="latest")
    found = paper.read(a, b)
    assert {line.name: line.verdict for line in found.lines} == {
        "s": "same",
        "t": "only in the first",
        "u": "only in the second",
    }
    assert found.differences == ("cann 9.1 and latest",)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"device": {}, "versions": {}, "results": [{"name": "s"}]}']
)
def test_what_is_no_outcome(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(paper.OutcomeError, match=r"a\.json"):
        paper.read(file)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the self-test writes is what is read."""
    written = str(tmp_path / "own.json")
    assert (
        main(["selftest", "--device", "cpu", "--only", "w0 kv0", "--heads", "1", "--out", written])
        == 0
    )
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert main(["selftest", "--compare", written, written, "--html", str(page)]) == 0
    assert "no check differs" in capsys.readouterr().out
    assert "0 failed" in page.read_text()
    assert main(["selftest", "--compare", written, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["selftest", "--compare", written, written, written]) == 2
    assert main(["selftest", "--compare", str(tmp_path / "absent.json")]) == 2
    failing = outcome(tmp_path / "failing.json", row("s", passed=False))
    assert main(["selftest", "--compare", written, str(failing)]) == 1
