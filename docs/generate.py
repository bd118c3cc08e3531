"""Write docs/rejections.md from the table of rejection codes.

python docs/generate.py           # write the page
python docs/generate.py --check   # exit 1 when the page is not what the table says
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from mla_fusion.fusion.rejection import CODES

PAGE = Path(__file__).with_name("rejections.md")

INTRODUCTION = """\
# Why a prologue was not fused

Every prologue that the pass recognises, wholly or in part, is either fused or listed in `Report.rejected` with one
of these codes. Codes are stable: tests and `Config.skip` may name them. The message in the report adds the dims and
the nodes concerned. A code may carry a part after a colon that says more: `contract:dims.he` is the check `dims.he`
of the operator's contract ([operator.md](operator.md)).

Generated from `mla_fusion/fusion/rejection.py` by `docs/generate.py`; do not edit.
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, *sections()])


def sections() -> Iterator[str]:
    """One table for each family of codes: what stands before the dot."""
    for family, codes in groupby(CODES, key=lambda code: code.partition(".")[0]):
        yield f"## {family}\n"
        yield "| code | what it means | what would make it fuse |"
        yield "| --- | --- | --- |"
        for code in codes:
            yield "| " + " | ".join((f"`{code}`", *(text.replace("|", "\\|") for text in CODES[code]))) + " |"
        yield ""


def main(arguments: Sequence[str]) -> int:
    wanted = page()
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text() != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
