"""Write docs/api.md, api-tools.md and configuration.md from signatures and docstrings: a table for
each public name.

python docs/generate_api.py           # write the pages
python docs/generate_api.py --check   # exit 1 when they are not what these say

A docstring says of a parameter, at its left edge, ``name   what it means``; further lines are
                                                            indented.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from written import write

import mla_fusion as mf
from mla_fusion.compile.prepack import PrepackedWeight
from mla_fusion.models import hf
from mla_fusion.report.rejection import Rejection
from mla_fusion.report.report import Fusion
from mla_fusion.tools.by_hand.outcome import Finding

DOCS = Path(__file__).parent
INTRODUCTION = """\
# Python

`import mla_fusion as mf` loads nothing, not even torch; each name loads its module on first use.
Import it before `torch` where torch_npu is installed without CANN. Here are the names with which
models are fused and reports read; [Python: tools](api-tools.md) has the others,
[configuration](configuration.md) the fields of `Config`. Generated from signatures and docstrings
by `docs/generate_api.py`; do not edit.
"""
TOOLS = """\
# Python: tools

Names beside [the pass itself](api.md): lowering, dumps, Hugging Face, calls by hand, the operator's
contract. Generated from signatures and docstrings by `docs/generate_api.py`; do not edit.
"""
CONFIGURATION = """\
# Configuration

`Config` has every option of the pass. Write `mf.backend(mf.Config(verify="all"))`, or for one model
`torch.compile(model, backend="mla_fusion", options={"verify": "all"})`; `mf.torchair_pass`,
`mf.fuse` and `mf.explain` take a `Config` too. More on [targets](targets.md), [staging](staged.md),
[weights and updates](weights.md). Generated from the docstring by `docs/generate_api.py`; do not
edit.
"""
LAST = """\
`mf.reference` has the kernels on CPU under the operators' names: `npu_mla_prolog_v3_functional`,
`npu_mla_prolog_v3`, `npu_mla_prolog_v2`, `npu_mla_prolog` and `mla_preprocess`. `mf.paging` makes
`cache_index` from block tables and slot lists of several stacks.
"""
SPACES = {"mf": mf, "hf": hf}
TASKS = {
    "Fuse a model": "backend torchair_pass fuse SlotError prepack Prepacked refresh release "
    "register_operator",
    "Ask what would fuse, and why not": "explain",
    "Read what happened": "reports Report Report.to_json Report.to_html",
    "See what an NPU would run": "lower Lowering Lowering.save offline.activate offline.on_npu",
    "Look into dumps": "inspect.read inspect.summarise inspect.diff inspect.export",
    "Convert a Hugging Face model": "hf.optimize hf.revert",
    "Check calls made by hand": "audit Audit",
    "Ask the operator's contract": "meta.check meta.infer meta.explain_call",
}
# what is met as an entry of another's field, or as what it gives, and has no name in mf
BESIDE: dict[str, dict[str, Any]] = {
    "Prepacked": {"PrepackedWeight": PrepackedWeight},
    "Report.to_html": {"Fusion": Fusion, "Rejection": Rejection},
    "Audit": {"Finding": Finding},
}
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_ROW = re.compile(r"^((?:\w+, )*\w+) {2,}(\S.*(?:\n +\S.*)*)\n*", re.MULTILINE)


def pages() -> dict[Path, str]:
    tools = list(TASKS).index("See what an NPU would run")
    configuration = "\n".join([CONFIGURATION, *described("mf.Config", mf.Config)])
    return {
        DOCS / "configuration.md": configuration,
        DOCS / "api.md": _page(INTRODUCTION, list(TASKS)[:tools]),
        DOCS / "api-tools.md": _page(TOOLS, list(TASKS)[tools:]) + LAST,
    }


def _page(introduction: str, tasks: Sequence[str]) -> str:
    parts = [introduction]
    for task in tasks:
        parts.append(f"## {task}\n")
        for name in TASKS[task].split():
            title = name if name.startswith("hf.") else f"mf.{name}"
            parts += described(title, found(title))
            for other, value in BESIDE.get(name, {}).items():
                parts += described(other, value)
    return "\n".join([*parts, ""])


def found(title: str) -> Any:
    space, *path = title.split(".")
    value: Any = SPACES[space]
    for name in path:
        value = getattr(value, name)
    return value


def described(title: str, value: Any) -> Iterator[str]:
    """The heading, the call, what the docstring says, and its table."""
    text, rows = inspect.getdoc(value) or "", list[str]()
    is_class = inspect.isclass(value)
    given = (
        {}
        if is_class and issubclass(value, Exception)
        else dict(inspect.signature(value).parameters)
    )
    given.pop("self", None)
    meanings = {name: "; ".join(parts) for name, parts in _meanings(text).items()}
    unknown = meanings.keys() ^ given.keys()
    if unknown:
        raise ValueError(
            f"the docstring of {title} and its signature differ in {', '.join(sorted(unknown))}"
        )
    settable = not is_class or value is mf.Config
    for name, parameter in given.items():
        default = [_default(parameter)] if settable else []
        cells = (
            f"`{_STARS.get(parameter.kind, '')}{name}`",
            _code(parameter.annotation),
            *default,
            meanings[name],
        )
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    first, _, rest = _ROW.sub("", text).strip().partition("\n\n")
    yield f"### {title}\n"
    if settable and value is not mf.Config:
        yield f"`{title}{_call(value)}`\n"
    yield f"{_plain(first)}\n"
    if rows:
        head = (
            ("parameter", "type", "default", "meaning")
            if settable
            else ("field", "type", "meaning")
        )
        yield "\n".join(("| " + " | ".join(head) + " |", "| --- " * len(head) + "|", *rows)) + "\n"
    if rest:
        yield f"{_plain(rest)}\n"


def _meanings(text: str) -> dict[str, list[str]]:
    held: dict[str, list[str]] = {}
    for names, meaning in _ROW.findall(text):
        for name in names.split(", "):
            held.setdefault(name, []).append(
                re.sub(r"(?<!\.)\.$", "", re.sub(r"\s+", " ", meaning.strip()))
            )
    return held


def _call(value: Any) -> str:
    signature = inspect.signature(value)
    shown = [
        one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()
    ]
    return (
        f"{inspect.Signature([one for one in shown if one.name != 'self'])} -> "
        f"{signature.return_annotation}"
    )


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is not inspect.Parameter.empty:
        return f"`{parameter.default!r}`"
    return "" if parameter.kind in _STARS else "required"


def _code(annotation: Any) -> str:
    return f"`{annotation}`"


def _plain(text: str) -> str:
    """Markdown of the little Sphinx that docstrings hold."""
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    return write(pages(), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
