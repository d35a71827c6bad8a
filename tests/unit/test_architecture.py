"""Imports run down only: cli, then commands, callbacks, module and datamodule, then the core, then functional."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import datamask_pl

ROOT = Path(datamask_pl.__file__).parent
# From the top down. A part that is not named belongs to the core, between `front` and `foundation`.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"fit"},
    {"commands", "callbacks", "module", "datamodule"},
    set(),
    {"functional", "distributed", "atomic", "storage"},
    {"errors"},
]
CORE = LAYERS.index(set())
APART = {"module", "datamodule", "callbacks"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports_of(name: str) -> set[str]:
    """Every module that a module imports, anywhere in its text; names of this package as far as they are modules."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in SOURCES else node.module for member in members}
    return found


def part_of(name: str) -> str:
    """The first level below the package."""
    return name.split(".")[1] if "." in name else ""


def layer_of(name: str) -> int:
    return next((level for level, parts in enumerate(LAYERS) if part_of(name) in parts), CORE)


def own_imports_of(name: str) -> set[str]:
    # the package itself holds the version alone
    return {other for other in imports_of(name) if other.startswith("datamask_pl.")}


@pytest.mark.parametrize("name", SOURCES)
def test_imports_run_down_only(name):
    for other in own_imports_of(name):
        assert layer_of(name) <= layer_of(other), f"{name} imports {other}, which is above it"
        is_apart = {part_of(name), part_of(other)} <= APART and part_of(name) != part_of(other)
        assert not is_apart, f"{name} imports {other}: they meet at the batch types alone"


@pytest.mark.parametrize("name", [name for name in SOURCES if part_of(name) == "functional"])
def test_functional_imports_torch_and_numpy_alone(name):
    for other in imports_of(name):
        is_own = part_of(other) in {"functional", "errors"} and other.startswith("datamask_pl.")
        assert is_own or other.split(".")[0] in {"torch", "numpy", *sys.stdlib_module_names}, f"{name} imports {other}"


def test_the_package_and_its_errors_import_nothing_of_it():
    assert not own_imports_of("datamask_pl")
    assert not own_imports_of("datamask_pl.errors")


def test_no_module_imports_itself_through_others():
    TopologicalSorter({name: own_imports_of(name) for name in SOURCES}).prepare()


COLLECTIVES = {
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "scatter",
}  # fmt: skip


def test_collectives_live_in_one_module():
    for name, path in SOURCES.items():
        called = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "dist"
        }
        assert name == "datamask_pl.distributed" or not called & COLLECTIVES, f"{name} calls {called & COLLECTIVES}"


def test_torch_distributed_is_known_to_few():
    users = {part_of(name) for name in SOURCES if any("torch.distributed" in other for other in imports_of(name))}
    assert users <= {"distributed", "strategy", "launch", "failures"}


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_has_at_most_400_lines(name):
    assert SOURCES[name].read_text(encoding="utf-8").count("\n") <= 400
