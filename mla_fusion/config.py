"""Defines the options of the pass: one frozen, hashable dataclass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mla_fusion.machine import AUTO, Machine, release_named, settled, soc_named

Skip = str | Callable[[Any], bool]

TARGETS = ("v3", "identity")
_CHOICES = {
    "enable": (False, True),
    "verify": ("off", "first", "all"),
    "staging": ("auto", "always", "never"),
    "kr_layout": ("exact", "half"),
    "updates": ("rounds", "counted", "every call"),
    "slots": ("trusted", "checked"),
    "strides": ("auto", "exact", "kernel"),
    "strict": (False, True),
}


@dataclass(frozen=True)
class Config:
    """Options of the fusion pass.

    enable      False leaves every graph untouched.
    verify      Compare each region with its replacement, on seeded CPU inputs:
                "off" never, "first" once per distinct region, "all" for every fusion.
    cann        CANN release whose limits hold: "8.2", "9.1", .., "latest", or as CANN
                writes it ("8.3.RC1").
    soc         Chip generation whose limits hold: "A2", "A3", "A5", or a chip's name ("910B",
                "Ascend910_93", "950PR"). "auto", the default of both, asks the NPU of this process;
                without one, A3 and the latest release are taken. The report says which.
    targets     Prologues that may be fused: "v3" for those with a W_uk product; "identity" for
                those without one, by weight_uk = [I | 0].
    staging     "auto" stages a fusion (the kernel writes small buffers, and the model's own cache
                writes stay) where a write by the kernel would not be exact, unless that saves
                nothing by the report's estimate. "always", or "never".
    kr_layout   "exact" never changes what a cache row holds. With "half" you promise that every
                reader and writer of kr_cache, and every reader of the rotated query and key, uses
                the half layout that the kernel writes.
    skip        What to leave alone without a warning: layers by the name that a report gives them,
                prologues that would be rejected with a code ("absorb.absent", "contract",
                "contract:dims.he"), or candidates for which a predicate holds.
    updates     How the backend notices that a parameter with a packed copy has changed. It sees
                changes that torch counts (``copy_`` and optimizers under no_grad,
                ``load_state_dict``), and new memory, before the next call, whatever you choose. For
                the others (``parameter.data.add_(..)``, fused optimizers, flat buffers), "rounds"
                reads a share of the bytes at each step, waits for nothing, and packs a change anew
                with a warning. "counted" does not look for them: call ``mla_fusion.refresh``.
                "every call" compares all bytes before each call: slow, for tests and debugging.
    slots       "trusted" takes slots that are an input as they are (non-negative, in range and
                distinct; the report lists the assumption). "checked" tests them before each call of
                ``mf.backend`` (``mla_fusion.SlotError``); a pass in another compiler cannot, and
                the assumption says so.
    strides     Strides of results that leave the graph, or that random and custom operators read.
                "exact": the model's, for which a permuted query may be copied. "kernel": the
                kernel's, dense with tokens first. "auto": "kernel" in GE graphs and behind the hook
                of another compiler, "exact" elsewhere.
    strict      True raises a defect of the pass. False leaves the graph as it was, with
                ``pass.failed`` in the report.

    Raises ValueError for a value outside these choices.
    """

    enable: bool = True
    verify: str = "first"
    cann: str = AUTO
    soc: str = AUTO
    targets: tuple[str, ...] = ("v3",)
    staging: str = "auto"
    kr_layout: str = "exact"
    skip: tuple[Skip, ...] = ()
    updates: str = "rounds"
    slots: str = "trusted"
    strides: str = "auto"
    strict: bool = False

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(
                    f"Config.{field} must be one of {', '.join(map(str, choices))}, got {value!r}"
                )
        for field, named in (("soc", soc_named), ("cann", release_named)):
            if (value := getattr(self, field)) != AUTO:
                try:
                    object.__setattr__(self, field, named(value))
                except ValueError as error:
                    raise ValueError(f"Config.{field}: {error}") from None
        for field in ("skip", "targets"):
            value = getattr(self, field)
            if isinstance(value, str) or not isinstance(value, Iterable):
                hint = f"; write ({value!r},)" if isinstance(value, str) else ""
                raise ValueError(f"Config.{field} takes a sequence, got {value!r}{hint}")
            object.__setattr__(self, field, tuple(value))
        for entry in self.skip:
            if not isinstance(entry, str) and not callable(entry):
                raise ValueError(
                    "Config.skip takes names of layers, codes of rejections, and predicates, got "
                    f"{entry!r}"
                )
        if not self.targets or any(name not in TARGETS for name in self.targets):
            raise ValueError(
                f"Config.targets must name some of {', '.join(TARGETS)}, got {self.targets!r}"
            )
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in self.targets))

    @classmethod
    def given(cls, config: Config | None) -> Config:
        """Returns the configuration that a function was called with, or the default for None.

        Raises TypeError for any other type.
        """
        if config is None or isinstance(config, cls):
            return config or cls()
        text = repr(config) if isinstance(config, str) else f"a {type(config).__name__}"
        raise TypeError(
            f"config must be a mla_fusion.Config, such as Config(verify='all'), got {text}"
        )

    def skips(self, code: str) -> bool:
        """Returns True if ``skip`` names a code of a rejection, or the part before its colon."""
        return code in self.skip or code.partition(":")[0] in self.skip

    @property
    def machine(self) -> Machine:
        """Returns ``soc`` and ``cann``, with "auto" resolved."""
        return settled(self.soc, self.cann)
