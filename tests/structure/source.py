"""The source tree as the structure tests see it: files, modules and what they import."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("launch", "runtime", "mtp", "moe", "parallel")


@dataclass(frozen=True)
class Module:
    """One source file, parsed."""

    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def root(self) -> str:
        return self.path.relative_to(ROOT).parts[0]


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the five packages."""
    found = []
    for root in ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Module(path, ast.parse(text, str(path)), len(text.splitlines())))
    assert found
    return tuple(found)


def imported_names(tree: ast.AST) -> set[str]:
    """Dotted names of everything imported anywhere in a file, functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def called_names(tree: ast.AST) -> set[str]:
    """Dotted names as written in every call: `torch.load(...)` gives `torch.load`."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@cache
def listed_packages() -> frozenset[str]:
    """The packages named in pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return frozenset(tomllib.load(file)["tool"]["setuptools"]["packages"])
