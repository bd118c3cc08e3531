"""Generated pages are current; translations have the headings, tables and code of originals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_fusion.examples.fuse_your_model import DR, HCQ, D, N, example

import mla_fusion as mf
from tests.harness import traced_graph
from tests.project.pages import DOCS, script
from tests.project.snippets import blocks

ROOT = DOCS.parent
TRANSLATED = {
    ROOT / "README.md": ROOT / "README.zh.md",
    DOCS / "index.md": DOCS / "index.zh.md",
    DOCS / "quick-start.md": DOCS / "quick-start.zh.md",
}


GENERATED = ["support", "cli", "notebook", "api", "serving", "worth"]


@pytest.mark.parametrize("name", [f"generate_{page}" for page in GENERATED])
def test_a_generated_page_is_current(name: str) -> None:
    assert script(name).main(["--check"]) == 0, "run `make docs`"


def test_every_public_name_has_its_place_among_the_tasks() -> None:
    named = {
        name.partition(".")[0]
        for names in script("generate_api").TASKS.values()
        for name in names.split()
    }
    by_a_sentence = {"paging", "reference"}
    assert set(mf.__all__) - by_a_sentence - {"Config"} <= named  # Config has a page of its own


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_a_translation_is_in_step(page: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (page, TRANSLATED[page])]
    shapes = [re.findall(r"^#+ ", text, re.MULTILINE) for text in texts]
    assert shapes[0] == shapes[1], "headings"
    rows = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in texts]
    assert rows[0] == rows[1], "rows of tables"
    code = [
        [(one.kind, one.title, one.text) for one in blocks(path)]
        for path in (page, TRANSLATED[page])
    ]
    assert code[0] == code[1], "code"
    pictures = [re.findall(r"!\[[^]]*\]\(([^)]*)\)", text) for text in texts]
    assert pictures[0] == pictures[1]


def test_links_of_readmes_lead_somewhere() -> None:
    for page in (
        ROOT / "README.md",
        ROOT / "README.zh.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
    ):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), f"{page.name}: {link}"


def test_every_variable_of_the_environment_is_listed() -> None:
    listed = script("generate_cli").VARIABLES
    used = {
        name
        for path in (ROOT / "mla_fusion").rglob("*.py")
        for name in re.findall(r'"(MLA_FUSION_[A-Z]+)"', path.read_text(encoding="utf-8"))
    }
    assert used and used <= set(listed)


def test_one_version_everywhere() -> None:
    for file, line in (
        ("CITATION.cff", f"version: {mf.__version__}"),
        ("CHANGELOG.md", f"## {mf.__version__}"),
    ):
        assert re.search(rf"^{re.escape(line)}$", (ROOT / file).read_text(), re.MULTILINE), file


def test_the_json_of_a_report_is_what_its_schema_promises() -> None:
    schema = json.loads((DOCS / "report.schema.json").read_text())
    model, arguments = example()
    fused = json.loads(mf.explain(traced_graph(model, *arguments)).to_json())
    model.q_b = torch.nn.Linear(HCQ, N * (D + DR), dtype=torch.bfloat16)
    left = json.loads(mf.explain(traced_graph(model, *arguments)).to_json())
    assert fused["fused"] and left["rejected"]
    for data in (fused, left):
        assert not list(_wrong(data, schema, "report"))


_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


def _wrong(value: Any, schema: dict[str, Any], where: str) -> Any:
    """What of the few words of JSON Schema that the file uses does not hold."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        value is None if kind == "null" else isinstance(value, _TYPES[kind]) for kind in kinds
    ):
        yield f"{where} is {type(value).__name__}"
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where} is {value!r}"
    yield from (
        f"{where} has no {name}" for name in schema.get("required", ()) if name not in value
    )
    for name, inner in schema.get("properties", {}).items():
        if name in value:
            yield from _wrong(value[name], inner, f"{where}.{name}")
    for item in value if "items" in schema else ():
        yield from _wrong(item, schema["items"], f"{where}[]")
