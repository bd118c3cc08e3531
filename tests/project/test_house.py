"""The house of docs/architecture.md: a room imports only rooms named above it, and no import runs
in a circle.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "mla_fusion": "mla_fusion",
    "meta": "mla_fusion.meta",
    "converters": "mla_fusion.converters",
}
ABOVE_ALL = ("_autoload", "_lazy", "_version")  # small files that any room may import


# files of cli.py's
COMMANDS = ("demo", "bench", "graphs_cli", "audit_cli", "proof_cli", "selftest_cli")


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports, at its top, in functions, or for type
    checkers.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mla_fusion"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def imports() -> dict[str, set[str]]:
    known = modules()
    return {
        name: {other for other in imported(path, known) if other != name}
        for name, path in known.items()
    }


def rooms() -> list[str]:
    """As the page lists them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = page[page.index("## Rooms") : page.index("## Stages")]
    return [
        name.rstrip("/").removesuffix(".py")
        for name in re.findall(r"^\| `([\w./]+)`", listed, flags=re.MULTILINE)
    ]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def test_no_import_runs_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()  # CycleError names the circle


def test_a_room_imports_only_rooms_above_it() -> None:
    order = {name: place for place, name in enumerate(rooms())}
    order |= dict.fromkeys(ABOVE_ALL, -1) | {
        name: len(order) for name in ("mla_fusion", *COMMANDS, "offline")
    }
    below = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if room(name) not in ("mla_fusion", *COMMANDS, "offline", "cli")
        and order[room(other)] > order[room(name)]
    ]
    assert not below


def test_every_folder_is_a_room_of_the_page() -> None:
    folders = {
        path.name for path in (ROOT / "mla_fusion").iterdir() if (path / "__init__.py").exists()
    }
    assert folders <= set(rooms())


def test_the_tests_of_a_room_stand_in_a_folder_of_its_name() -> None:
    """Beside these folders: whole fusions, what all tests share, attacks, the releases, and the
    project itself.
    """
    others = {"fusion", "catalogue", "soundness", "project", "matrix"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    assert folders - others <= set(rooms())
