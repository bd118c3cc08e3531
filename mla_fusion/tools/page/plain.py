"""A small page that stands alone: headings, notes and a table. No template engine is needed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.2rem; overflow-wrap: anywhere }}
ul {{ padding: 0 }}
li {{ margin: .6rem 0; padding-left: .6rem; border-left: 4px solid #c33; list-style: none }}
li.maybe {{ border-color: #c90 }} small {{ opacity: .8; overflow-wrap: anywhere }}
div {{ overflow-x: auto }} table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #8886 }}
</style></head>
<body>{headings}{notes}{table}</body></html>
"""
Note = tuple[str, str, Sequence[str]]  # kind ("wrong" or "maybe"), text, lines below


def write(
    path: str | Path,
    title: str,
    headings: Sequence[str],
    notes: Sequence[Note],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    otherwise: str,
) -> Path:
    """Write the page; ``otherwise`` stands there where there is neither note nor row. Everything is
    escaped.
    """
    listed = "".join(
        f"<li class='{kind}'>{_lines((text, *below))}</li>" for kind, text, below in notes
    )
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    table = f"<div><table><tr>{_cells('th', header)}</tr>{body}</table></div>" if body else ""
    nothing = "" if listed or table else f"<p>{html.escape(otherwise)}</p>"
    heads = "".join(f"<h1>{html.escape(heading)}</h1>" for heading in headings)
    file = Path(path)
    text = _PAGE.format(
        title=title, headings=heads, notes=f"<ul>{listed}</ul>" if listed else nothing, table=table
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _cells(tag: str, row: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)


def _lines(texts: Sequence[str]) -> str:
    first, *rest = map(html.escape, texts)
    return "".join([first, *(f"<br><small>{line}</small>" for line in rest)])
