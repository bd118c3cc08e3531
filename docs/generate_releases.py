"""Write docs/releases.md, and the table of README, from `mla_fusion.releases` and the outcome of
the matrix.

python docs/generate_releases.py           # write them
python docs/generate_releases.py --check   # exit 1 when they are not what the table and the outcome
                                           say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from written import between, write  # noqa: E402

from mla_fusion.releases import RELEASES, Release, for_torch  # noqa: E402
from tests.matrix import outcome  # noqa: E402

PAGE = ROOT / "docs" / "releases.md"
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
BEGIN, END = "<!-- releases: written by docs/generate_releases.py -->\n", "<!-- /releases -->"

INTRODUCTION = """\
# Releases

Which torch_npu works, what the others lack, and what was tested. Generated from
`mla_fusion/releases.py` and `tests/matrix/outcome.json` by `docs/generate_releases.py`; do not
edit.

What decides is the post release: torch_npu 2.9.0 and 2.9.0.post9 are for the same torch, and only
the second has the torchair that graphs are compiled through. A release without it is refused by
`mf.lower`, `mf.offline.activate`, `mla-fusion doctor` and, on an NPU, `mf.backend`, with the
release to install and before anything of it is imported (`mla_fusion.releases.UnsupportedRelease`).
The backend on CPU tensors, `mf.fuse`, `mf.explain`, `mf.reference` and `mf.meta` need no torch_npu,
and work beside any, on torch 2.7 or newer.
"""

MATRIX = """\
## The matrix

`make matrix` installs each pair into an environment of its own and runs a named subset of the tests
there (`tests/matrix/cells.py`); `make matrix PAIR=2.10.0` does it for one, `WITH=3.12` with another
interpreter, `QUICK=1` with fewer tests. "ok" is that all tests of a cell passed, "-" that none was
run.

Where the package index has torch as a CUDA build only, torch's CUDA libraries are replaced by inert
ones (`tests/matrix/without_cuda.py` says why, and what that leaves out). Nobody has run this on an
NPU.
"""

REMARKS = """\
## What differs between releases

* **torch 2.6** has not all of the operator's dtypes: importing `mla_fusion` refuses it, with the
  pair to install.
* **torch 2.7**: `Library.impl` has no `allow_override`, and `Graph.call_function` takes no `name`.
  Both are done otherwise.
* **up to torch 2.10**: AOT autograd takes no fake tensors of another mode than dynamo's. `mf.lower`
  rebuilds its inputs in that mode, with the symbols that dynamo has for their sizes.
* **up to torch 2.9**: AOT autograd takes every composite operator apart while it traces; from 2.10
  on only those that autograd takes apart, and torch_npu has a kernel of its own for `aten.matmul`.
  So up to 2.9 a matrix product behind the prologue, of the model's attention say, becomes `mm` or
  `expand` and `bmm` by the strides of the query that the *unfused* graph has, and can differ from
  that of a model with the call written by hand. The prologue itself is the same on all releases:
  the matrix compares it with a reader that is no product.
* **torch_npu 2.8.0.post5 and others without the dtype arguments**: `npu_mla_prolog_v3` has no
  `token_x_dtype` and four like it; the pass passes none.

## Machines

All of this was run on x86-64. On aarch64, emulated (qemu-user; Python 3.11, torch 2.10.0 and
torch_npu 2.10.0.post7 from their aarch64 wheels), these passed once: the reference of v3, the
backend on CPU, offline activation, `mf.lower` to GE and npugraph_ex graphs, their parity with the
call by hand, RoPE's facts and the weights' numbers, 90 tests. OpenBLAS, with which those builds of
torch multiply bfloat16, rounds partial sums; the reference works in float32 there. Python 3.14 was
run with Debian's interpreter. No extra of the package names torch or torch_npu, so
`pip install '.[torchair]'` leaves those of an NPU machine alone (`tests/project/test_install.py`
asks pip's resolver).
"""

SCHEMAS = {
    "absent": "no npu_mla_prolog_v3: this package defines it, on CPU alone",
    "no dtypes": "npu_mla_prolog_v3 without its five dtype arguments",
    "whole": "npu_mla_prolog_v3 and its functional form, as in 2.13.0",
}
TORCHAIRS = {
    "absent": "no hook before its passes, no npugraph_ex, no converter of v3",
    "old": "a hook and a converter of v3, no npugraph_ex",
    "whole": "a hook, a converter of v3, npugraph_ex",
}


def support(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The releases as a table."""
    yield "| torch_npu | torch | works | operator | torchair |"
    yield "| --- | --- | --- | --- | --- |"
    ran = {row["torch_npu"] for row in rows}
    for row in RELEASES:
        works = _works(row, row.torch_npu in ran)
        schema, torchair = SCHEMAS[row.schema], TORCHAIRS[row.torchair]
        yield f"| {row.torch_npu} | {row.torch} | {works} | {schema} | {torchair} |"


def _works(row: Release, ran: bool) -> str:
    if not row.works:
        return f"refused: install {for_torch(row.torch).torch_npu}"
    return "yes" if ran else "by its files; not run"


def short(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What README says: the pairs that work, and with which interpreters they were run."""
    yield "| torch | torch_npu | tested with Python |"
    yield "| --- | --- | --- |"
    for release in RELEASES:
        runs = [
            row
            for row in rows
            if row["torch_npu"] == release.torch_npu and not list(outcome.failures([row]))
        ]
        if release.works and runs:
            pythons = ", ".join(row["python"] for row in runs)
            yield f"| {release.torch.partition('+')[0]} | {release.torch_npu} | {pythons} |"


def ran(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The outcome, a pair a column: there are more cells than pairs fit beside each other."""
    header, lines = outcome.table(list(rows))
    yield "| | " + " | ".join(line[0] for line in lines) + " |"
    yield "| --- |" + " --- |" * len(lines)
    for place, name in list(enumerate(header))[1:]:
        yield f"| {name} | " + " | ".join(line[place] for line in lines) + " |"


def page(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join([INTRODUCTION, *support(rows), "", MATRIX, *ran(rows), "", REMARKS])


def readme(text: str, rows: Iterable[dict[str, Any]]) -> str:
    """README with the table of today."""
    table = "\n".join(short(list(rows)))
    return between(text, BEGIN, END, f"{table}\n")


def main(arguments: Sequence[str]) -> int:
    rows = json.loads(outcome.KEPT.read_text())
    return write(
        {PAGE: page(rows), **{path: readme(path.read_text(), rows) for path in READMES}}, arguments
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
