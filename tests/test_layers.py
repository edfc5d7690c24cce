"""The layout: files import from below, never in a circle, and nobody takes another's private names."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "slipstream"

# From the bottom up: files and folders of src/slipstream. Those on one line don't know each other.
LAYERS = [
    {"errors", "merged", "version"},
    {"checks", "cluster", "colours", "compiled", "kept", "notices", "turns", "urls", "user_files", "workers"},
    {"tree", "sampling", "stopwatch", "text", "grammar"},
    {"budget", "kernels", "loading", "stats"},
    {"counts", "targets"},
    {"residuals"},
    {"accept"},
    {"options", "request"},
    {"datastores", "heads"},
    {"drafters"},
    {"sequence"},
    {"engine", "jobs"},
    {"kept_texts", "trace"},
    {"service"},
    {"answers"},
    {"llm", "rows"},
    {"demo", "evaluate", "hook", "vllm"},
    {"plan", "server", "training"},
    {"cli"},
    {"__main__"},
]


def module_name(path: Path) -> str:
    """As it is imported; a package is called by its folder."""
    return ".".join(("slipstream", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


FILES = {module_name(path): path for path in ROOT.rglob("*.py")}


@cache
def statements(name: str) -> list[ast.Import | ast.ImportFrom]:
    """Its imports: at its beginning, within functions, and for type checkers alone."""
    every = ast.walk(ast.parse(FILES[name].read_text("utf-8")))
    return [node for node in every if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(name: str) -> set[str]:
    """The project's modules that one imports."""
    found = set()
    for node in statements(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & FILES.keys()) or {node.module}
    return found & FILES.keys()


def layer(name: str) -> int:
    part = name.split(".")[1]
    return next(i for i, parts in enumerate(LAYERS) if part in parts)


def test_every_file_and_folder_has_its_layer():
    there = {name.split(".")[1] for name in FILES if name != "slipstream"}
    assert there == set().union(*LAYERS)


def test_imports_look_down():
    up = [
        (name, other)
        for name in FILES.keys() - {"slipstream"}
        for other in imported(name)
        if other == "slipstream" or layer(other) >= layer(name)
    ]
    assert not [(a, b) for a, b in up if b.split(".")[1:2] != [a.split(".")[1]]], "these stand above them, or beside"


def test_no_imports_run_in_a_circle():
    TopologicalSorter({name: imported(name) for name in FILES}).prepare()


def test_nobody_takes_anothers_private_names():
    taken = [
        (name, f"{node.module}.{alias.name}")
        for name in FILES
        for node in statements(name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__") and f"{node.module}.{alias.name}" not in FILES
    ]
    assert not taken
