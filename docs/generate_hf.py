"""Write the tables of docs/hugging-face.md: features of releases, and the results of the matrix of
transformers.

python docs/generate_hf.py           # write them
python docs/generate_hf.py --check   # exit 1 when they are not what the code and
                                     tests/matrix/hf.json say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from written import between, write  # noqa: E402

from mla_fusion.models.features import FEATURES  # noqa: E402
from tests.matrix import hf  # noqa: E402

PAGE = ROOT / "docs" / "hugging-face.md"
BEGIN, END = "<!-- {}: written by docs/generate_hf.py -->\n", "<!-- /{} -->"


def features() -> str:
    """What is asked of a release, and what is done where it is absent."""
    rows = [(f"{item.since}", item.text, item.asked_of, item.without) for item in FEATURES]
    return _table(("since", "feature", "asked of", "without it"), rows)


def results(rows: Sequence[dict[str, Any]]) -> str:
    """Releases by columns: how many tests passed, the largest ratio of errors, which models there
    are.
    """
    header = ("transformers", *hf.CELLS, "largest ratio of errors", "models converted")
    lines = []
    for row in rows:
        cells = [hf.word(row["cells"].get(name, {})) for name in hf.CELLS]
        lines.append(
            (row["transformers"], *cells, str(row["largest_ratio"]), str(len(row["models"])))
        )
    models = [
        f"* {row['transformers']}: {', '.join(f'`{name}`' for name in row['models'])}"
        for row in rows
    ]
    return "\n".join([_table(header, lines), *models, ""])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def written(text: str) -> str:
    """The page with its tables as they should be."""
    kept = json.loads(hf.KEPT.read_text())
    for name, table in (("features", features()), ("results", results(kept))):
        text = between(text, BEGIN.format(name), END.format(name), f"\n{table}\n")
    return text


def main(arguments: Sequence[str]) -> int:
    return write({PAGE: written(PAGE.read_text())}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
