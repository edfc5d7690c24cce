"""A drafter's description and options, parsed from its source: importing a drafter would load torch."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slipstream import drafters

if TYPE_CHECKING:
    from slipstream.drafters.base import Drafter


class Option(NamedTuple):
    name: str
    default: str
    comment: str  # the comment beside its field, which is the option's help text


class Module(NamedTuple):
    name: str
    lines: list[str]
    classes: dict[str, ast.ClassDef]
    imported: dict[str, tuple[str, str]]  # name in this module: (module it is imported from, its name there)


def about(name: str) -> tuple[str, list[Option]]:
    """A drafter's description, the first line of its docstring, and its options."""
    if any(entry.name == name for entry in entry_points(group=drafters.GROUP)):
        return _loaded(drafters.find(name))  # of another package: import it, as its source may be anywhere
    module = read(f"{drafters.__name__}.{name}")
    for kind in module.classes:
        family = list(lineage(module, kind))
        if any(c.name == "Drafter" for _, c in family):
            sentence = (ast.get_docstring(family[0][1]) or "").partition("\n")[0]
            return sentence, options(*_options_class(family))
    raise AssertionError(f"{module.name} defines no drafter")


def options(module: Module, name: str) -> list[Option]:
    """The fields of a dataclass, those of its base classes first."""
    found: dict[str, Option] = {}
    for home, kind in reversed(list(lineage(module, name))):
        for node in kind.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                found[node.target.id] = Option(node.target.id, _value(node.value), _comment(home.lines, node))
    return list(found.values())


def lineage(module: Module, name: str) -> Iterator[tuple[Module, ast.ClassDef]]:
    """A class and those of its base classes that slipstream defines."""
    if name in module.imported:
        home, name = module.imported[name]
        module = read(home)
    if name in module.classes:
        yield module, module.classes[name]
        for base in module.classes[name].bases:
            if isinstance(base, ast.Name):
                yield from lineage(module, base.id)


@cache
def read(name: str) -> Module:
    path = Path(__file__).parent.parent.joinpath(*name.split(".")[1:])
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    tree = ast.parse(text)
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream.")
        for alias in node.names
    }
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return Module(name, text.splitlines(), classes, imported)  # type: ignore[arg-type]


def _options_class(family: list[tuple[Module, ast.ClassDef]]) -> tuple[Module, str]:
    for module, kind in family:
        for node in kind.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(t, ast.Name) and t.id == "Options" for t in targets):
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                assert isinstance(node.value, ast.Name)
                return module, node.value.id
    raise AssertionError("Drafter itself has Options")


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """The comment after a field, or on the lines above it."""
    after = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].partition("#")[2]
    first = last = node.lineno - 1
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return after.strip() or " ".join(line.strip(" #") for line in lines[first:last])


def _value(node: ast.expr) -> str:
    try:
        return str(ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node)


def _loaded(kind: type[Drafter]) -> tuple[str, list[Option]]:
    source = "\n".join(inspect.getsource(c) for c in reversed(kind.Options.__mro__) if c is not object)
    comments = dict(re.findall(r"^\s+(\w+): .*?#\s*(.+)$", source, re.MULTILINE))
    sentence = (kind.__doc__ or "").strip().partition("\n")[0]
    return sentence, [Option(f.name, str(f.default), comments.get(f.name, "")) for f in fields(kind.Options)]
