"""What a user may decide about the pass: one frozen value, hashable, with nothing hidden in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_fusion.machine import AUTO, Machine, release_named, settled, soc_named

Skip = str | Callable[[Any], bool]

TARGETS = {  # the ladder: each is tried where those above it, as far as they are asked for, are not possible
    "v3": "npu_mla_prolog_v3, for the whole prologue",
    "identity": "the same where no W_uk product follows, with weight_uk = [I | 0]",
    "preprocess": "npu_mla_preprocess (ATB), for prologues in W8A8 by scales fixed ahead of time",
    "key": "npu_kv_rmsnorm_rope_cache_v2, for the key's norm, rotation and cache writes alone",
}
_CHOICES = {
    "verify": ("off", "first", "all"),
    "staging": ("auto", "always", "never"),
    "kr_layout": ("exact", "half"),
    "unabsorbed": ("skip", "identity"),
    "weights": ("copy", "shared"),
    "updates": ("rounds", "counted", "every call"),
    "slots": ("trusted", "checked"),
    "strides": ("auto", "exact", "kernel"),
    "strict": (False, True),
}
_FORMER_UPDATES = {"checked": "every call", "trusted": "counted"}  # names of 0.1.0


@dataclass(frozen=True)
class Config:
    """Options of the fusion pass.

    enable      False leaves every graph untouched.
    verify      Run the cut-out region against its replacement on seeded CPU inputs:
                "off" never, "first" once per distinct region, "all" for every fusion.
    cann        CANN release whose limits hold: "8.2" .. "9.1", "latest", or a version as CANN writes it ("8.3.RC1").
    soc         Chip generation whose limits hold: "A2", "A3", "A5", or a chip's name ("910B", "Ascend910_93", "950PR").
                "auto", the default of both, asks the NPU of this process; without one, A3 and the latest release are
                taken. The report says which.
    staging     May the kernel write small buffers from which the model's own cache writes go on?
                "auto" where the in-kernel write would not be exact, "always", or "never".
    kr_layout   "exact" never changes what a cache row holds. "half" is the caller's word that every
                reader and writer of kr_cache uses the half layout that the kernel writes.
    targets     Operators that may be emitted, tried in this order whatever the order given: "v3" for whole prologues;
                "identity", the same for those without a W_uk product, by weight_uk = [I | 0]; "preprocess",
                npu_mla_preprocess for static W8A8 (not in GE graphs); "key",
                npu_kv_rmsnorm_rope_cache_v2 for the key's half alone, where no other target takes the prologue.
    unabsorbed  "identity" is the target of that name.
    skip        What to leave alone without a warning: layers by the name that a report gives them, prologues that
                would be rejected with a code ("absorb.absent", "contract", "contract:dims.he"), or candidates for which
                a predicate holds.
    weights     Where packed weights live, when a wrapper stands around the graph (``mf.backend``): "copy" beside the
                parameters, or "shared": a parameter whose packing only changes its layout becomes a view of the
                packed weight, so that memory does not grow. It keeps its shape and values, and gets other strides.
    updates     How a change of a parameter, of which a packed copy exists, is noticed. Changes that torch counts
                (``copy_`` and optimizers under no_grad, ``load_state_dict``), and new memory, are seen before the
                next call, whatever is chosen. The others (``parameter.data.add_(..)``, fused optimizers, flat
                buffers) are found by "rounds": each step reads a share of the bytes, waits for nothing, and a
                change is packed anew with a warning. "counted" does not look for them: call ``mla_fusion.refresh``.
                "every call" compares all bytes before each call: for tests and debugging, slow.
    slots       What an input that holds cache slots is taken at: "trusted" at its word (non-negative, in range and
                distinct, listed under the report's assumptions), "checked" before each call where a wrapper stands
                around the graph (``mla_fusion.SlotError``); where none does, the assumptions say that nothing checks.
    strides     A result that leaves the graph has the model's strides ("exact"), for which a permuted query may have
                to be copied, or the kernel's, dense with tokens first ("kernel"). "auto" is "kernel" behind the
                hook of another compiler, which lays out its results itself, and in GE graphs, whose results
                have no strides; it is "exact" elsewhere.
    strict      True raises a defect of the pass. False leaves the graph as it was, with ``pass.failed`` in the report.

    Raises ValueError for a value outside these choices.
    """

    enable: bool = True
    verify: str = "first"
    cann: str = AUTO
    soc: str = AUTO
    staging: str = "auto"
    kr_layout: str = "exact"
    targets: tuple[str, ...] = ("v3",)
    unabsorbed: str = "skip"
    skip: tuple[Skip, ...] = ()
    weights: str = "copy"
    updates: str = "rounds"
    slots: str = "trusted"
    strides: str = "auto"
    strict: bool = False

    def __post_init__(self) -> None:
        if self.updates in _FORMER_UPDATES:
            object.__setattr__(self, "updates", _FORMER_UPDATES[self.updates])
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(f"Config.{field} must be one of {', '.join(map(str, choices))}, got {value!r}")
        for field, named in (("soc", soc_named), ("cann", release_named)):
            if (value := getattr(self, field)) != AUTO:
                try:
                    object.__setattr__(self, field, named(value))
                except ValueError as error:
                    raise ValueError(f"Config.{field}: {error}") from None
        for field in ("skip", "targets"):
            value = getattr(self, field)
            if isinstance(value, str):
                raise ValueError(f"Config.{field} takes a sequence, got the string {value!r}; write ({value!r},)")
            object.__setattr__(self, field, tuple(value))
        self._set_targets()

    def _set_targets(self) -> None:
        """In the ladder's order, and in agreement with ``unabsorbed``."""
        known = tuple(TARGETS)
        if not self.targets or any(name not in known for name in self.targets):
            raise ValueError(f"Config.targets must name some of {', '.join(known)}, got {self.targets!r}")
        wanted = {*self.targets, *(["identity"] if self.unabsorbed == "identity" else [])}
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in wanted))
        object.__setattr__(self, "unabsorbed", "identity" if "identity" in wanted else "skip")

    @classmethod
    def given(cls, config: Config | None) -> Config:
        """What a function was called with, the default for None. Raises TypeError for anything else."""
        if config is None or isinstance(config, cls):
            return config or cls()
        said = repr(config) if isinstance(config, str) else f"a {type(config).__name__}"
        raise TypeError(f"config must be a mla_fusion.Config, such as Config(verify='all'), got {said}")

    @property
    def machine(self) -> Machine:
        """``soc`` and ``cann`` with "auto" found out."""
        return settled(self.soc, self.cann)
