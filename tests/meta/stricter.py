"""Calls that `check` refuses although the vendor's own host code takes them: on purpose, and these
only.

The vendor's checks were run on random calls, whose verdicts are in `data`. Every call on
which `check` and they disagree belongs to one class here, and `check` is the one that refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_fusion.meta.limits import RELEASES, SOCS, VERSIONS, known_releases

_ANY_VERSION = ("v1", "v2", "v3")


@dataclass(frozen=True)
class Scope:
    """From CANN ``since`` on, before ``until``, on these SoCs, for versions of the operator."""

    since: str = RELEASES[0]
    until: str | None = None
    socs: tuple[str, ...] = SOCS
    versions: tuple[str, ...] = _ANY_VERSION

    def holds(self, op: str, soc: str, cann: str) -> bool:
        """Whether one operator on one SoC at one release is in it."""
        known = known_releases(cann)
        begun = self.since in known and self.until not in known
        return begun and soc in self.socs and VERSIONS[op] in self.versions


@dataclass(frozen=True)
class Stricter:
    """One class: its codes, where the vendor would take the call, what is refused, and why."""

    name: str
    codes: tuple[str, ...]
    scopes: tuple[Scope, ...]
    refused: str
    reason: str


STRICTER = (
    Stricter(
        "older-on-A5",
        ("quant.weight_quant_mode",),
        (Scope("8.5", socs=("A5",), versions=("v1", "v2")),),
        "v1 and v2 on A5",
        "CANN's definitions list A5 from 8.5 on, but torch_npu's meta functions of both refuse "
        "it, so no call gets "
        "there; with CANN 9.0 the host check reads an attribute that they do not have, and crashes",
    ),
    Stricter(
        "strided-cache",
        ("contiguous.kv_cache", "contiguous.kr_cache"),
        (Scope(until="latest", versions=("v3",)), Scope(versions=("v1", "v2"))),
        "a cache that is not contiguous, before the newest v3",
        "the check does not look at strides: the cache is copied on the way in and the rows go to "
        "the copy, or the "
        "kernel takes it for a contiguous one and writes other rows",
    ),
    Stricter(
        "older-cache-width",
        ("shape.kv_cache",),
        (Scope("8.5", versions=("v1", "v2")),),
        "a kv_cache of v1 or v2 whose rows are not Hckv wide",
        "the width is compared in v3 alone; the kernel writes rows of Hckv whatever the cache's "
        "own are",
    ),
    Stricter(
        "padded-weight",
        ("shape.weight_dq", "shape.weight_uq_qr", "shape.weight_dkv_kr"),
        (Scope(),),
        "a weight whose sizes are wrong by less than a FRACTAL_NZ block",
        "the check sees the padded storage, in which the difference is gone; the product is over "
        "the padding then",
    ),
    Stricter(
        "modes-not-read",
        ("quant.", "forbidden.actual_seq_len", "forbidden.k_nope_clip_alpha"),
        (Scope(until="8.5", versions=("v3",)),),
        "modes that do not say what the tensors are, and arguments that have no meaning, of v3 "
        "before 8.5",
        "the release reads the scenario off the dtypes and ignores the rest; torch_npu allocates "
        "by the modes, and "
        "with any later release the call means something else or is refused",
    ),
    Stricter(
        "modes-past-32-bits",
        ("quant.weight_quant_mode", "quant.combination", "quant.tile_size"),
        (Scope("8.5", versions=("v3",)),),
        "a mode or tile_size that is legal in its lower 32 bits alone",
        "the check cuts the upper bits off; nobody means such a number",
    ),
)


def stricter(op: str, soc: str, cann: str, code: str) -> tuple[Stricter, ...]:
    """The classes that a refusal with this code may belong to there."""
    return tuple(
        row
        for row in STRICTER
        if any(
            code == known or (known.endswith(".") and code.startswith(known)) for known in row.codes
        )
        and any(scope.holds(op, soc, cann) for scope in row.scopes)
    )
