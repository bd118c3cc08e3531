"""Write the table of routes in docs/serving.md, from the list that tests/serving/test_routes.py
goes through.

python docs/generate_serving.py           # write it
python docs/generate_serving.py --check   # exit 1 when it is not what tests/serving/routes.py says
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from written import between, write  # noqa: E402

from tests.serving.routes import ROUTES  # noqa: E402

PAGE = ROOT / "docs" / "serving.md"
BEGIN, END = "<!-- routes: written by docs/generate_serving.py -->", "<!-- /routes -->"
PACKS = {
    "outside": "once, around the graph",
    "inside": "in the graph; after `mf.prepack` views alone",
    "once": "once, by one call in the graph",
}


def table() -> str:
    lines = ["| route | what to write | packing | tested here up to |", "| --- | --- | --- | --- |"]
    for route in ROUTES:
        lines.append(f"| {route.name} | {route.how} | {PACKS[route.packs]} | {route.reaches} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    return write({PAGE: between(PAGE.read_text(), BEGIN, END, f"\n{table()}\n")}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
