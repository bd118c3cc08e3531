"""Text as wide as the terminal: lines, tables, help."""

from __future__ import annotations

import io
import sys

import pytest

from mla_fusion.report import text_tables, wrapping
from mla_fusion.tools import cli, terminal

ROWS = [
    (f"w{n} kv{n}", "graph", "a note that goes on and on, as notes of self-tests do", n * 1000)
    for n in range(3)
]
TABLE = text_tables.render(("scenario", "through", "what was found", "ns"), ROWS)
REPORT = (
    "  - model.layers.0: [norm.absent] add, mul and rsqrt make what is projected, no RMSNorm; see "
    "line 3 of it"
)


def lines(text: str) -> list[str]:
    """Those that hold more than one word: a word alone may be as long as it is."""
    return [line for line in text.splitlines() if len(line.split()) > 1]


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_nothing_is_wider(columns: int) -> None:
    fitted = wrapping.fitted(f"{REPORT}\n{TABLE}\n\n{REPORT}", columns)
    assert all(len(line) <= columns for line in lines(fitted))
    for word in (REPORT + TABLE).replace("-", " ").split():
        assert (
            fitted.count(word) or columns < 60
        )  # a cell breaks a word that is wider than its column


def test_a_report_that_python_prints_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command's does; into a file or a pipe each line goes whole."""
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    assert wrapping.on_a_terminal(REPORT) == REPORT
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "40")
    assert wrapping.on_a_terminal(REPORT) == wrapping.fitted(REPORT, 40) != REPORT


def test_what_fits_stays() -> None:
    assert wrapping.fitted(TABLE, 120) == TABLE and wrapping.fitted(REPORT, 120) == REPORT


def test_a_table_keeps_its_columns_and_ends_where_it_ends() -> None:
    found = wrapping.fitted(
        f"{TABLE}\n  cache_mode PA_BSND, rmsnorm_epsilon_cq 1e-06, tile_size 128 and more", 50
    )
    head, rule, *rows = found.splitlines()
    spans = rule.split("  ")
    assert len([part for part in spans if part.strip()]) == 4 and head.startswith(
        "  scenario  through"
    )
    assert rows[-2].startswith("  cache_mode") and rows[-1].startswith("      ")
    assert any(row.rstrip().endswith(" 2000") for row in rows)


def test_columns_are_those_of_the_environment_or_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert terminal.width() == 44
    monkeypatch.setenv("COLUMNS", "3")
    assert terminal.width() == 20
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal.width() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal.width() is not None
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal.width() is None


COMMANDS = (
    "demo doctor explain lower inspect diff audit guide selftest bench check-model check-proof"
).split()


@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.parametrize("columns", [40, 60, 80])
def test_help(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        cli.main([*filter(None, [command]), "--help"])
    said = capsys.readouterr().out
    assert said and all(len(line) <= columns or len(line.split()) == 1 for line in lines(said))


def test_nothing_in_a_name_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show("q\x1b[2J \u202e norm\x00\tvor Größe\n中文")
    assert capsys.readouterr().out == "q\\x1b[2J \\u202e norm\\x00\tvor Größe\n中文\n"
