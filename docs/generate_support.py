"""Write docs/support.md and the short table of README: which model, chip, CANN release and
quantisation go together.

python docs/generate_support.py           # write them
python docs/generate_support.py --check   # exit 1 when they are not what the tables say
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mla_fusion.meta.limits import limits  # noqa: E402
from written import between, write  # noqa: E402

from mla_fusion.machine import RELEASES, SOCS  # noqa: E402

PAGE, READMES = ROOT / "docs" / "support.md", (ROOT / "README.md", ROOT / "README.zh.md")
BEGIN, END = "<!-- support: written by docs/generate_support.py -->", "<!-- /support -->"
OPERATOR = "npu_mla_prolog_v3"
CHIPS = {"A2": "A2 (910B)", "A3": "A3 (910C, 910_93)", "A5": "A5 (950)"}

# From the models' published configurations; N: heads of one rank, of which any divisor is one.
MODELS: dict[str, dict[str, int]] = {
    "DeepSeek-V3, R1, V3.1, V3.2": {"He": 7168, "Hcq": 1536, "N": 128, "D": 128},
    "Kimi-K2": {"He": 7168, "Hcq": 1536, "N": 64, "D": 128},
    "DeepSeek-V2, V2.5": {"He": 5120, "Hcq": 1536, "N": 128, "D": 128},
    "LongCat-Flash": {"He": 6144, "Hcq": 1536, "N": 64, "D": 128},
    "GLM-5": {"He": 6144, "Hcq": 2048, "N": 64, "D": 192},
    "GLM-4.7-Flash": {"He": 2048, "Hcq": 768, "N": 20, "D": 192},
    "MiniCPM3": {"He": 2560, "Hcq": 768, "N": 40, "D": 64},
}
# weight_quant_mode, kv_cache_quant_mode: what a model does, and what the pass makes of it
QUANTISATIONS = {
    (0, 0): ("none: bfloat16", "fused"),
    (1, 0): ("W8A8 dynamic on W_uq_qr alone", "fused"),
    (1, 2): ("the same, int8 caches with a scale a channel", "fused"),
    (1, 3): ("the same, caches of 656 bytes a row, a scale a tile", "fused"),
    (2, 0): ("W8A8 dynamic on all three projections", "fused"),
    (2, 1): ("the same, an int8 latent cache with one scale, int8 query", "fused"),
    (2, 3): ("the same, caches of 656 bytes a row, a scale a tile", "fused"),
    (3, 0): ("mxfp8 on all three projections, by npu operators", "fused"),
    (3, 1): ("the same, a float8 latent cache with one scale, float8 query", "fused"),
    (3, 3): ("the same, caches of 656 bytes a row, a scale a tile", "fused"),
    (4, 0): ("float8_e4m3fn on all three projections, by npu operators", "fused"),
    (4, 1): ("the same, a float8 latent cache with one scale, float8 query", "fused"),
    (4, 3): ("the same, caches of 656 bytes a row, a scale a tile", "fused"),
    (5, 0): ("hifloat8 on all three projections, by npu operators", "fused"),
    (5, 1): ("the same, a hifloat8 latent cache with one scale, hifloat8 query", "fused"),
    (5, 3): ("the same, caches of 656 bytes a row, a scale a tile", "fused"),
}
INTRODUCTION = """\
# What goes together

The first CANN release whose host check takes a thing, by chip. Generated from the tables of the
operator's contract by `docs/generate_support.py`; do not edit. The contract has
[every size](operator.md), [releases](releases.md) say which torch and torch_npu. **Nothing here has
run on an NPU**: these are the limits that CANN's sources state.
"""


def first(soc: str, fits: Mapping[str, int], modes: tuple[int, int] = (0, 0)) -> str:
    """The first release that takes these sizes and modes; "-" where none does."""
    for cann in RELEASES:
        found = limits(OPERATOR, soc, cann)
        taken = modes in found.quant_modes and not found.absent
        if taken and all(value in found.dims[axis] for axis, value in fits.items() if axis != "N"):
            return "newest" if cann == "latest" else cann
    return "-"


def models() -> Iterator[str]:
    yield "| model | He | Hcq | D | " + " | ".join(f"CANN on {CHIPS[soc]}" for soc in SOCS) + " |"
    yield "| --- " * (4 + len(SOCS)) + "|"
    for name, dims in MODELS.items():
        cells = (
            str(dims["He"]),
            str(dims["Hcq"]),
            str(dims["D"]),
            *(first(soc, dims) for soc in SOCS),
        )
        yield f"| {name} | " + " | ".join(cells) + " |"


def quantisations() -> Iterator[str]:
    yield (
        "| quantisation | " + " | ".join(f"CANN on {CHIPS[soc]}" for soc in SOCS) + " | the pass |"
    )
    yield "| --- " * (2 + len(SOCS)) + "|"
    for modes, (name, outcome) in QUANTISATIONS.items():
        yield f"| {name} | " + " | ".join(first(soc, {}, modes) for soc in SOCS) + f" | {outcome} |"


def page() -> str:
    return "\n".join(
        [
            INTRODUCTION,
            "## Models\n",
            *models(),
            '\n"-": no release takes the sizes. Heads of a rank that a release does not take are '
            "padded with zeros. Models of `transformers` are converted first "
            "([Hugging Face](hugging-face.md)); a model of your own needs the absorbed form "
            "([how](absorb.md)).\n",
            "## Quantisation\n",
            *quantisations(),
            "\nStatic W8A8, W8A16 and int4 are not fused (`quant.static`, `quant.weights_only`, "
            "`linear.hidden`).\n",
        ]
    )


def readme(text: str) -> str:
    """The README with the table of models of today."""
    table = "\n".join(models())
    return between(text, BEGIN, END, f"\n{table}\n")


def main(arguments: Sequence[str]) -> int:
    return write({PAGE: page(), **{path: readme(path.read_text()) for path in READMES}}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
