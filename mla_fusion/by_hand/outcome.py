"""What an audit found, as data and as text."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or looks so.

    code      stable: "tables.swapped", "epsilon", "contract:..", ..
    certain   shown by numbers or by the contract; else a suspicion
    line      of the caller's code
    error     the largest error that is left when this, and all findings before it, are mended
    """

    code: str
    message: str
    argument: str = ""
    operator: str = ""
    call: int | None = None
    line: str = ""
    certain: bool = True
    error: float | None = None

    def __str__(self) -> str:
        mark = "-" if self.certain else "?"
        where = f"\n      at {self.line}" if self.line else ""
        left = f" (largest error then {self.error:.2g})" if self.error is not None else ""
        of = f", call {self.call}" if self.call is not None else ""
        return f"  {mark} [{self.code}] {self.operator}{of}: {self.message}{left}{where}"


@dataclass(frozen=True)
class Audit:
    """equal      is every compared value the reference's? None where there was no reference
    errors     relative error of each compared value, as written
    repaired   the same with every repair that was found
    tolerance  of each value, the error that is rounding
    tried      how many runs of the repaired function it took
    """

    operators: tuple[str, ...]
    findings: tuple[Finding, ...]
    equal: bool | None = None
    errors: dict[str, float] | None = None
    repaired: dict[str, float] | None = None
    tolerance: dict[str, float] | None = None
    draws: tuple[str, ...] = ()
    tried: int = 0

    @property
    def ok(self) -> bool:
        """Nothing is known to be wrong."""
        return self.equal is not False and not any(item.certain for item in self.findings)

    def to_json(self) -> str:
        """Every field, with ``ok``."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2, default=str)

    def __str__(self) -> str:
        calls = f"{len(self.operators)} call{'s' * (len(self.operators) != 1)} of " + ", ".join(
            dict.fromkeys(self.operators)
        )
        if not self.operators:
            calls = "no audited operator is called"
        verdict = {
            True: "equal to the reference",
            False: "NOT equal to the reference",
            None: "no reference to compare with",
        }[self.equal]
        lines = [f"mla_fusion audit: {calls}; {verdict}"]
        if self.errors:
            lines.append(f"  compared on {' and '.join(self.draws)}")
            width = max(map(len, self.errors))
            for name, error in self.errors.items():
                after = (self.repaired or {}).get(name)
                mended = f"   repaired {after:.2g}" if after is not None and self.equal is False else ""
                limit = (self.tolerance or {}).get(name, 0.0)
                lines.append(f"    {name:<{width}}  error {error:.2g}{mended}   rounding up to {limit:.2g}")
        lines += map(str, self.findings)
        if self.equal is False and not any(item.error is not None for item in self.findings):
            lines.append(f"  no repair that is known explains it ({self.tried} runs; `tries` and `seconds` allow more)")
        return "\n".join(lines)

    def to_html(self, path: str | Path) -> Path:
        """Write a page that stands alone."""
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{error:.2g}</td>"
            f"<td>{(self.repaired or {}).get(name, error):.2g}</td></tr>"
            for name, error in (self.errors or {}).items()
        )
        found = "".join(
            f"<li class='{'wrong' if item.certain else 'maybe'}'><code>{html.escape(item.code)}</code> "
            f"{html.escape(item.operator)}: {html.escape(item.message)}"
            + (f"<br>largest error then {item.error:.2g}" if item.error is not None else "")
            + (f"<br><small>{html.escape(item.line)}</small>" if item.line else "")
            + "</li>"
            for item in self.findings
        )
        title = html.escape(str(self).splitlines()[0])
        table = f"<table><tr><th>value</th><th>error</th><th>repaired</th></tr>{rows}</table>" if rows else ""
        listed = f"<ul>{found}</ul>" if found else "<p>Nothing found.</p>"
        text = _PAGE.format(title=title, findings=listed, table=table)
        file = Path(path)
        file.write_text(text, encoding="utf-8")
        return file


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>mla_fusion audit</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.2rem }}
li {{ margin: .6rem 0; padding-left: .6rem; border-left: 4px solid #c33; list-style: none }}
li.maybe {{ border-color: #c90 }}
table {{ border-collapse: collapse }} th, td {{ text-align: left; padding: .2rem 1rem .2rem 0 }}
small {{ opacity: .8; overflow-wrap: anywhere }}
</style></head>
<body><h1>{title}</h1>{findings}{table}</body></html>
"""
