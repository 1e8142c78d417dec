"""What must not appear in the source: pickle and its kin, module-level process groups, files too long to read."""

from __future__ import annotations

import ast

import pytest

from tests.structure.source import Module, called_names, imported_names, modules

MAX_LINES = 350
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNPICKLING_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load"}
OBJECT_COLLECTIVES = {  # torch.distributed pickles their arguments
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
GROUP_MAKERS = {"init_process_group", "new_group", "init_device_mesh", "DeviceMesh"}
GROUP_OWNER = "parallel/groups.py"


def pickling(tree: ast.AST) -> set[str]:
    """Imports and calls in a file that can execute what they read."""
    imports = imported_names(tree)
    calls = called_names(tree)
    return (
        {n for n in imports if n.split(".")[0] in PICKLES or n in UNPICKLING_CALLS}
        | (calls & UNPICKLING_CALLS)
        | {c for c in calls if c.split(".")[-1] in OBJECT_COLLECTIVES}
    )


def module_level_groups(tree: ast.Module) -> set[str]:
    """Process groups or meshes made while a module is imported (class bodies count, function bodies do not)."""
    made: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            made.add(ast.unparse(node.func).split(".")[-1])
        todo.extend(ast.iter_child_nodes(node))
    return made & GROUP_MAKERS


def global_statements(tree: ast.AST) -> list[str]:
    return [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
class TestEveryModule:
    def test_no_pickle_in_any_form(self, module: Module) -> None:
        assert not pickling(module.tree)

    def test_no_remote_code(self, module: Module) -> None:
        assert "trust_remote_code" not in module.path.read_text(encoding="utf-8")

    def test_no_module_level_process_group(self, module: Module) -> None:
        assert not module_level_groups(module.tree)

    def test_only_groups_py_initialises_process_groups(self, module: Module) -> None:
        inits = {c for c in called_names(module.tree) if c.split(".")[-1] == "init_process_group"}
        assert not inits or module.name == GROUP_OWNER

    def test_no_global_statement(self, module: Module) -> None:
        assert not global_statements(module.tree)

    def test_short_enough_to_read(self, module: Module) -> None:
        assert module.num_lines <= MAX_LINES

    def test_has_a_docstring(self, module: Module) -> None:
        assert not module.tree.body or ast.get_docstring(module.tree)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
    ],
)
def test_the_check_itself_sees_pickle(source: str) -> None:
    assert pickling(ast.parse(source))


def test_the_check_itself_sees_groups() -> None:
    assert module_level_groups(ast.parse("GROUP = dist.new_group([0])")) == {"new_group"}
    assert module_level_groups(ast.parse("class A:\n    g = init_device_mesh('cpu', (1,))")) == {"init_device_mesh"}
    assert not module_level_groups(ast.parse("def f():\n    return dist.new_group([0])"))
