"""What an entry of the catalogue says of a model, and how tests select entries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

import mla_fusion as mf

from .base import Base, Prologue, paged_args

IN_PLACE, STAGED = "in place", "staged"
OURS = "written for this project"
Make = Callable[[], nn.Module]
Args = Callable[[], tuple[Tensor, ...]]
Kind = TypeVar("Kind", bound=Make)

TAGS = {
    # what is spelled in a way of its own
    "whole": "a whole prologue as DeepSeek's users write it, every step in its own way",
    "rope": "the rotation",
    "norm": "a norm",
    "tables": "cos and sin: where their rows come from",
    "weights": "projections and how their weights are held",
    "absorb": "the product with W_uk",
    "cache": "how rows are written, and to which slots",
    "layout": "axes in another order, values assembled in place",
    "readers": "who reads what the kernel keeps to itself, or gives out once",
    "int8": "int8 weights, queries or caches",
    "plain": "int8 by plain operators alone",
    "floats": "weights in the float formats of A5: mxfp8, fp8, hifloat8",
    # what it is
    "near miss": "one thing is wrong: it stays unfused, or is fused as what it is",
    "public": "a near miss that public code writes so: one thing is otherwise than the kernel has "
    "it",
    "operators": "calls npu operators",
    # what tests do with it beside compiling it
    "run": "a near miss that is compiled and run without verification, its numbers compared",
    "symbolic": "also compiled with dynamic sizes",
    "device": "also captured for device npu",
    "export": "also exported",
    "portable": "its numbers are compared under other instruction sets too",
    "unabsorbed": 'has no product with W_uk: read under Config(targets=("v3", "identity"))',
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model, where it is fused or why not, and who writes it so."""

    name: str
    model: Make
    args: Args = paged_args
    outcome: tuple[str, ...]  # a placement for each prologue, or one rejection code
    alone: tuple[str, ...] = ()  # the same without a boundary around the graph, where that differs
    source: str
    tags: frozenset[str]
    weight_quant_mode: int = 0
    kv_cache_quant_mode: int = 0
    slack: float = 1.2  # how much more than the unfused run the fused one may err
    targets: tuple[str, ...] = ("v3",)  # of Config
    soc: str = "A3"  # of Config
    instead_of: str = ""  # why the whole prologue is not what is fused
    detail: str = ""  # what the report says behind the placement, where that is part of the outcome

    def __post_init__(self) -> None:
        unknown = self.tags - TAGS.keys()
        if unknown or not self.source or not self.outcome:
            raise ValueError(
                f"{self.name}: needs a source and an outcome, and has no tags {sorted(unknown)}"
            )

    def __str__(self) -> str:
        return self.name

    def config(self, **options: Any) -> mf.Config:
        """With the entry's targets and chip."""
        targets = ("v3", "identity") if "unabsorbed" in self.tags else self.targets
        return mf.Config(targets=targets, soc=self.soc, **options)


ENTRIES: dict[str, Entry] = {}
FILES: dict[str, Path] = {}
"""The file that each entry stands in."""


def add(entry: Entry) -> None:
    if entry.name in ENTRIES:
        raise ValueError(f"two entries are named {entry.name}")
    ENTRIES[entry.name] = entry
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    FILES[entry.name] = Path(frame.f_code.co_filename)


def words(tags: str) -> frozenset[str]:
    return frozenset(tag.strip() for tag in tags.split(",") if tag.strip())


def entry(
    *outcome: str, source: str, tags: str, name: str = "", **fields: Any
) -> Callable[[Kind], Kind]:
    """Puts a class of models into the catalogue, under its own name."""

    def register(model: Kind) -> Kind:
        add(
            Entry(
                name=name or model.__name__,
                model=model,
                outcome=outcome,
                source=source,
                tags=words(tags),
                **fields,
            )
        )
        return model

    return register


def miss(
    *outcome: str, tags: str, of: str = "the base prologue", **fields: Any
) -> Callable[[Kind], Kind]:
    """Puts a near miss into the catalogue, and what becomes of it: a code, or placements."""
    return entry(
        *outcome, source=f"{OURS}: a near miss of {of}", tags=f"near miss, {tags}", **fields
    )


def based(name: str, heads: int = 2, **methods: Any) -> Make:
    """The base prologue with other methods."""
    kind = type(name, (Base,), methods)

    def make() -> nn.Module:
        model = kind.__new__(kind)
        Prologue.__init__(model, heads)
        return model

    return make


Methods = dict[str, Any]


def misses(tags: str, table: dict[str, tuple[Methods, str]]) -> None:
    """Near misses of the base prologue by what it has in place of which methods, and what becomes
    of each; compiled and run.
    """
    for name, (methods, outcome) in table.items():
        miss(outcome, tags=f"{tags}, run", name=name)(based("m", **methods))


def step(
    method: str, *outcome: str, tags: str, source: str = OURS, heads: int = 2, **fields: Any
) -> Callable[[Any], Any]:
    """Puts the base prologue with another ``method`` into the catalogue, named by the function."""

    def register(body: Any) -> Any:
        model = based(body.__name__, heads, **{method: body})
        entry(*outcome, source=source, tags=tags, name=body.__name__, **fields)(model)
        return body

    return register


def select(*tags: str, without: str | Iterable[str] = ()) -> list[Entry]:
    """Entries that have all of ``tags`` and none of ``without``."""
    wanted, unwanted = set(tags), words(without) if isinstance(without, str) else set(without)
    unknown = (wanted | unwanted) - TAGS.keys()
    if unknown:
        raise ValueError(f"no tags {sorted(unknown)}")
    return [item for item in ENTRIES.values() if wanted <= item.tags and not unwanted & item.tags]
