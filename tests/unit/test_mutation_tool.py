"""tools/mutation.py, without mutmut, which is not installed beside the package."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
from fits import ROOT

REACHED = set()
OF_MUTMUT = {
    "mutmut": {},
    "mutmut.configuration": {"config": None},
    "mutmut.mutation": {},
    "mutmut.mutation.file_mutation": {"mutate_file_contents": None},
    "mutmut.mutation.trampoline": {"set_mutant_under_test": lambda name: None},
    "mutmut.state": {"state": lambda: SimpleNamespace(_stats=REACHED)},
}


@pytest.fixture
def tool(monkeypatch):
    for name, content in OF_MUTMUT.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("mutation", ROOT / "tools/mutation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def look(tool, workplace, monkeypatch):
    """Looks at one test, which reaches f of those modules that carry changes; returns whether it was run."""
    item = SimpleNamespace(nodeid="test_f", path=workplace / "test_f.py")
    item.path.write_text("def test_f(): ...")

    def look_at(*changed):
        (workplace / "datamask_pl").mkdir(exist_ok=True)
        for module in ("a", "b"):
            (workplace / f"datamask_pl/{module}.py").write_text("changed" if module in changed else "as it is")
        runs = []

        def run(plugin, items):
            runs.extend(items)
            REACHED.update(f"{module}.f" for module in changed)

        monkeypatch.setattr(tool.Mutation, "run", run)
        plugin = tool.Mutation({}, seconds=1.0)
        plugin.look_at_tests([item])
        return bool(runs), plugin.tests["test_f"]["reaches"]

    return look_at


def test_what_a_test_reaches_is_found_out_again_where_other_modules_carry_changes(look):
    assert look("a") == (True, ["a.f"])
    assert look("b") == (True, ["b.f"])
    assert look("a", "b") == (True, ["a.f", "b.f"])


def test_what_a_test_reaches_is_found_out_once_where_nothing_is_another(look):
    assert look("a") == (True, ["a.f"])
    assert look("a") == (False, ["a.f"])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("x = zeros(3, device=own.device)", "x = zeros(3, )", True),
        ("x = zeros(3, device=own.device)", "x = zeros(3, device=None)", True),
        ("x = zeros(3, device=own.device)", "x = zeros(4, device=own.device)", False),
        ("zip(a, b, strict=True)", "zip(a, b, strict=False)", True),
        ("zip(a, b, strict=True)", "zip(a, None, strict=True)", False),
    ],
)
def test_only_the_device_and_the_strictness_of_zip_cannot_be_noticed(tool, before, after, expected):
    assert tool.is_unnoticeable(before, after) is expected


def test_what_runs_in_a_fork_leaves_this_process_as_it_is_and_tells_that_it_failed(tool, workplace):
    done = []

    def leave_a_file():
        done.append("in the fork")
        (workplace / "left").touch()

    tool.in_a_fork(leave_a_file)
    assert (workplace / "left").exists()
    assert done == []
    with pytest.raises(SystemExit, match="could not be looked at"):
        tool.in_a_fork(int, "no number")
