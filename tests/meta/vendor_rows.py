"""Verdicts of the vendor's host code on random calls, as calls of `mf.meta`.

``tests/meta/data/vendor_verdicts.jsonl.gz`` holds one JSON object a line: the vendor's infershape,
inferdatatype, tiling checks and tiling, of five releases, were compiled and run on calls made at
random. ``graph`` is infer-shape and tiling, ``eager`` is tiling over the results that torch_npu
allocates, ``op_def`` says whether a column of the operator's definition has the call's dtypes.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mla_fusion.meta.prolog import PROLOGS

from mla_fusion import meta

FILE = Path(__file__).parent / "data" / "vendor_verdicts.jsonl.gz"
PATHS = ("eager", "graph")
# GE's numbers of dtypes; hifloat8 is uint8 in torch
GE_DTYPES = {
    0: torch.float32,
    2: torch.int8,
    27: torch.bfloat16,
    34: torch.uint8,
    36: torch.float8_e4m3fn,
    37: torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Row:
    """One call with what the vendor said of it."""

    line: int
    data: dict[str, Any]

    @property
    def op(self) -> str:
        return str(self.data["op"])

    @property
    def where(self) -> dict[str, str]:
        """The SoC and the release, as `mf.meta` takes them."""
        return {"soc": self.data["soc"], "cann": self.data["cann"]}

    @property
    def crashed(self) -> bool:
        """The vendor's check ended in a segmentation fault: there is no verdict."""
        return "crash" in self.data

    def taken(self, path: str) -> bool:
        """Whether the vendor takes the call."""
        return bool(self.data[path]) and self.data["op_def"] is not False

    def call(self) -> dict[str, Any]:
        """The arguments by name, with tensors on meta."""
        return self.data["attributes"] | {
            name: _tensor(*text) for name, text in self.data["tensors"].items()
        }

    def refusal(self, path: str) -> meta.ContractError | None:
        """What `mf.meta.check` says, None when it takes the call."""
        try:
            meta.check(self.op, path=path, **self.where, **self.call())
        except meta.ContractError as error:
            return error
        return None

    def results(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes that the vendor infers, by name."""
        given = zip(PROLOGS[self.op].ge_results, self.data["outputs"], strict=True)
        return {name: (tuple(shape), GE_DTYPES[kind]) for name, (shape, kind) in given}

    def __str__(self) -> str:
        changes = "; ".join(self.data["mutations"]) or "as drawn"
        return (
            f"line {self.line}: {self.op} on {self.where}: {changes}; the vendor: "
            f"{self.data.get('message')}"
        )


def _tensor(kind: str, shape: list[int], strides: list[int] | None = None) -> torch.Tensor:
    dtype = getattr(torch, kind)
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@cache
def rows() -> tuple[Row, ...]:
    """Every row of the file."""
    with gzip.open(FILE, "rt") as lines:
        return tuple(Row(number, json.loads(line)) for number, line in enumerate(lines, 1))
