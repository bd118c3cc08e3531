"""Write the table of README and docs/worth.md that says what each target is worth, from the
costs in meta/explain.py.

python docs/generate_worth.py           # write it
python docs/generate_worth.py --check   # exit 1 when it is not what the costs say
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from written import between, write  # noqa: E402

from mla_fusion import meta  # noqa: E402
from mla_fusion.observe.gain import BYTES_PER_SECOND, LAUNCH  # noqa: E402
from mla_fusion.tools.selftest.samples import sample_call  # noqa: E402

PAGES = (ROOT / "README.md", ROOT / "README.zh.md", ROOT / "docs" / "worth.md")
BEGIN, END = "<!-- worth: written by docs/generate_worth.py -->", "<!-- /worth -->"
OPERATOR = "npu_mla_prolog_v3"
TOKENS, HEADS = 64, 16
# DeepSeek-V3 on eight ranks, as docs/worth.md says.
DIMS = dict(He=7168, Hcq=1536, N=HEADS, D=128, Dr=64, Hckv=512, BlockNum=2, BlockSize=128, Nkv=1)
ROW = 2 * (512 + 64)  # bytes of the rows of both caches, for one token
# A staged fusion of a plain layer: two buffers that GE moves once, and the model's two writes.
STAGING = (4, 4 * ROW * TOKENS)


class Way(NamedTuple):
    """One row: kernels and bytes of a layer before and after."""

    target: str
    needs: str
    default: str
    caches: str
    before: tuple[int, int]
    after: tuple[int, int]

    def cells(self) -> tuple[str, ...]:
        launches, size = (
            before - after for before, after in zip(self.before, self.after, strict=True)
        )
        gain = launches * LAUNCH + size / BYTES_PER_SECOND["A3"]
        counted = f"{self.before[0]} to {self.after[0]}"
        moved = f"{self.before[1] / 1e6:.1f} to {self.after[1] / 1e6:.1f} MB"
        return (
            self.target,
            self.needs,
            self.default,
            self.caches,
            counted,
            moved,
            f"up to {gain * 1e6:.0f} us",
        )


def ways() -> Iterator[Way]:
    explained = _call()
    steps = explained.steps
    whole = explained.unfused.kernels, explained.unfused.bytes
    fused = 1, explained.fused.bytes
    needs = "an absorbed layer in bfloat16 or W8A8 dynamic"
    yield Way(
        '`"v3"`', f"{needs}; caches as inputs, written by slot", "on", "in place", whole, fused
    )
    staged = fused[0] + STAGING[0], fused[1] + STAGING[1]
    yield Way('`"v3"`', "the same, any cache", "on", "staged", whole, staged)

    absorb = next(step for step in steps if step.name == "absorb W_uk")
    plain = whole[0] - 1, whole[1] - absorb.weight_bytes - absorb.other_bytes
    needs = "a layer without W_uk (Hugging Face's own)"
    yield Way('`"identity"`', needs, "off", "staged", plain, staged)


def _call() -> meta.CallExplanation:
    call = sample_call(dims=DIMS, lead=(TOKENS,), weight_quant_mode=0, kv_cache_quant_mode=0)
    return meta.explain_call(OPERATOR, **call)


def table() -> str:
    head = (
        "target",
        "needs",
        "default",
        "caches",
        "launches a layer",
        "bytes a layer",
        "indicative gain a layer",
    )
    rows = (head, ("---",) * len(head), *(way.cells() for way in ways()))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(arguments: Sequence[str]) -> int:
    text = f"\n{table()}\n"
    return write({path: between(path.read_text(), BEGIN, END, text) for path in PAGES}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
