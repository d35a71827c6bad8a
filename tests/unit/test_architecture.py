"""Imports run down only, floor by floor, and each rule of the house holds."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import datamask_pl

ROOT = Path(datamask_pl.__file__).parent
# From the top down; rooms on one floor do not import each other.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"cli_messages", "cli_options"},
    {"commands"},
    {"callbacks"},
    {"evidence"},
    {"learner", "mask"},
    {"objectives", "data"},
    {"distributed", "embedding"},
    {"functional", "io"},
    {"errors", "compat", "_moved"},
]
MAX_ROOMS = 18
PAGE = (ROOT.parent / "docs/architecture.md").read_text(encoding="utf-8")


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


def room_of(name: str) -> str:
    """The first level below the package."""
    return name.split(".")[1] if "." in name else ""


def floor_of(name: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if room_of(name) in rooms)


def own_imports_of(name: str) -> set[str]:
    # the package itself imports nothing before a name is asked for
    return {other for other in imports_of(name) if other.startswith("datamask_pl.")}


def test_every_room_has_a_floor_and_rooms_are_few():
    rooms = {room_of(name) for name in SOURCES if room_of(name)}
    assert rooms == set().union(*FLOORS)
    assert len(rooms) <= MAX_ROOMS


@pytest.mark.parametrize("name", [name for name in SOURCES if room_of(name)])
def test_imports_run_down_only(name):
    for other in own_imports_of(name):
        if room_of(name) != room_of(other):
            assert floor_of(name) < floor_of(other), f"{name} imports {other}, which is not below it"


@pytest.mark.parametrize("name", [name for name in SOURCES if room_of(name) == "functional"])
def test_functional_imports_torch_and_numpy_alone(name):
    for other in imports_of(name):
        is_own = room_of(other) in {"functional", "errors"} and other.startswith("datamask_pl.")
        assert is_own or other.split(".")[0] in {"torch", "numpy", *sys.stdlib_module_names}, f"{name} imports {other}"


@pytest.mark.parametrize(
    ("name", "other"),
    [("datamask_pl.learner", "datamask_pl.data.module"), ("datamask_pl.callbacks", "datamask_pl.data.module"),
     ("datamask_pl.callbacks", "datamask_pl.learner.module")],
)  # fmt: skip
def test_learner_data_module_and_callbacks_meet_at_the_batch_types(name, other):
    assert not [source for source in SOURCES if source.startswith(name) and other in imports_of(source)]


def test_the_package_is_imported_without_its_dependencies():
    assert own_imports_of("datamask_pl") - type_checking_imports_of("datamask_pl") == {"datamask_pl._moved"}
    assert not own_imports_of("datamask_pl.errors")
    assert not own_imports_of("datamask_pl._moved")


def type_checking_imports_of(name: str) -> set[str]:
    body = ast.parse(SOURCES[name].read_text(encoding="utf-8")).body
    guards = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {node.module for guard in guards for node in ast.walk(guard) if isinstance(node, ast.ImportFrom)}


def test_every_public_name_is_there():
    for name in datamask_pl.__all__:
        assert getattr(datamask_pl, name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = datamask_pl.Nothing


def test_no_module_imports_itself_through_others():
    graph = {name: own_imports_of(name) for name in SOURCES if name != "datamask_pl"}
    TopologicalSorter(graph).prepare()


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
        is_home = name == "datamask_pl.distributed.collectives"
        assert is_home or not called & COLLECTIVES, f"{name} calls {called & COLLECTIVES}"


def test_torch_distributed_is_known_to_one_room():
    users = {room_of(name) for name in SOURCES if any("torch.distributed" in other for other in imports_of(name))}
    assert users == {"distributed"}


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "datamask_pl.compat"])
def test_private_names_of_others_are_used_in_one_module(name):
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | {"_replace"}  # NamedTuple's
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            is_of_self = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            assert is_of_self or node.attr in own, f"{name} uses {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] != "datamask_pl":
            assert not [alias for alias in node.names if re.match(r"_[^_]", alias.name)], f"{name}: {node.module}"


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_has_at_most_400_lines(name):
    assert SOURCES[name].read_text(encoding="utf-8").count("\n") <= 400


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from `def` on, without its docstring."""
    first = function.body[0]
    has_text = ast.get_docstring(function, clean=False) is not None
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1) * has_text


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_has_at_most_50_lines_without_its_docstring(name):
    for node in ast.walk(ast.parse(SOURCES[name].read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert length_of(node) <= 50, f"{node.name} has {length_of(node)} lines"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./]+(?:/|\.(?:py|md|yml)))`", PAGE))))
def test_a_path_that_is_named_exists(path):
    assert (ROOT.parent / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize(("path", "names"), re.findall(r"`([\w/]+\.py)` \(((?:`[\w.]+`(?:, )?)+)\)", PAGE))
def test_what_is_named_beside_a_file_is_in_it(path, names):
    source = (ROOT / path).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w.]+)`", names):
        assert re.search(rf"\b{name.split('.')[-1]}\b", source), f"{path} has no {name}"


def test_every_room_of_the_package_is_on_a_floor_of_the_page():
    named = set(re.findall(r"`(\w+)(?:/|\.py)`", "".join(re.findall(r"^\| \d.*$", PAGE, re.MULTILINE))))
    assert set().union(*FLOORS) - {"__main__", "_moved"} == named


def test_the_page_stays_short():
    assert len(PAGE.splitlines()) <= 120
