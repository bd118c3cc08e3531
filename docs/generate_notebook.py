"""Write examples/quick_start.ipynb from docs/quick-start.md: its text and its code, a cell each.

python docs/generate_notebook.py           # write it
python docs/generate_notebook.py --check   # exit 1 when it is not what the page says
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from written import write

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "quick-start.md", ROOT / "examples" / "quick_start.ipynb"
_CODE = re.compile(r"^```python\n(.*?)^```\n\n```text\n.*?^```\n", re.DOTALL | re.MULTILINE)


def cells(text: str) -> Iterator[dict[str, Any]]:
    """Text and code in turn. What a block prints is left to the reader's kernel."""
    text = re.sub(r"\]\((?!#|http|\.\./)([^)]*)\)", r"](../docs/\1)", text).replace(
        "](../examples/", "]("
    )
    for place, part in enumerate(_CODE.split(text)):
        if part.strip():
            kind = "code" if place % 2 else "markdown"
            made: dict[str, Any] = {"cell_type": kind, "id": f"cell-{place}", "metadata": {}}
            made["source"] = part.strip().splitlines(keepends=True)
            yield made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook() -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": list(cells(PAGE.read_text())), "metadata": {"kernelspec": kernel}}
    return (
        json.dumps(whole | {"nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False)
        + "\n"
    )


def main(arguments: Sequence[str]) -> int:
    return write({NOTEBOOK: notebook()}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
