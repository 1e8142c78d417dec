"""Imports point down, `launch.cli` stays light, and each root is this checkout's and this distribution's alone."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure.source import ROOT, ROOTS, Module, imported_names, listed_packages, modules

BELOW = {
    "launch": {"launch", "runtime", "mtp", "moe", "parallel"},
    "runtime": {"runtime", "mtp", "moe", "parallel"},
    "mtp": {"mtp", "parallel"},
    "moe": {"moe", "parallel"},
    "parallel": {"parallel"},
}


def upward_imports(root: str, tree: ast.AST) -> set[str]:
    """Imports of a file under `root` that do not point down."""
    return {n for n in imported_names(tree) if n.split(".")[0] in set(ROOTS) - BELOW[root]}


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_imports_point_down(module: Module) -> None:
    assert not upward_imports(module.root, module.tree)


@pytest.mark.parametrize(
    ("root", "source", "found"),
    [
        ("parallel", "from runtime.plan import StepPlan", {"runtime.plan.StepPlan"}),
        ("mtp", "def f():\n    import moe.router", {"moe.router"}),
        ("moe", "from mtp import head", {"mtp.head"}),
        ("runtime", "import launch", {"launch"}),
        ("runtime", "import moe.router, mtp.head, parallel.linear, json", set()),
    ],
)
def test_the_check_itself_sees_upward_imports(root: str, source: str, found: set[str]) -> None:
    assert upward_imports(root, ast.parse(source)) == found


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip()


def test_importing_the_command_line_stays_light() -> None:
    heavy = ("torch", "numpy", "transformers", "safetensors", "tokenizers", "pydantic", "rich")
    code = f"import sys, launch.cli; print([name for name in {heavy!r} if name in sys.modules])"
    assert run_python(code) == "[]"


@pytest.mark.parametrize("package", sorted(listed_packages()))
def test_nothing_heavy_or_stateful_happens_at_package_import(package: str) -> None:
    assert run_python(f"import sys, {package}; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("root", ROOTS)
def test_each_root_resolves_to_this_checkout(root: str) -> None:
    spec = importlib.util.find_spec(root)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / root / "__init__.py"


def test_each_root_belongs_to_this_distribution_alone() -> None:
    owners = importlib.metadata.packages_distributions()
    if not any("lockstep" in names for names in owners.values()):
        pytest.skip("lockstep is not installed (run `make test`)")
    assert {root: set(owners.get(root, [])) for root in ROOTS} == {root: {"lockstep"} for root in ROOTS}


def test_every_package_is_listed_in_pyproject() -> None:
    on_disk = {".".join(m.path.relative_to(ROOT).parent.parts) for m in modules()}
    assert on_disk == set(listed_packages())


def test_every_package_has_an_init_file() -> None:
    for package in listed_packages():
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package
