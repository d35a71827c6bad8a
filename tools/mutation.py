"""Changes the formulas in thousands of small ways, and asks of each change whether a test notices.

    python tools/mutation.py [MODULE ...]

of `datamask_pl/functional/`, by default all. mutmut makes the changes, in a copy of the package in mutants/. All tests
are collected once, and run once to see how long they take and which functions they reach. Each change is then tried in
a fork of that process, with the tests that reach it: those of its own module first, then the quickest. Modules, pytest
and the tests are there already, so that a change that is noticed takes a few hundredths of a second.

What a change that a test has noticed needs not be tried again while its module stays as it is; all others are.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import gc
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutmut.configuration import config
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

FOLDER = Path("mutants")
FORMULAS = Path("datamask_pl/functional")
TESTS = [
    "tests/unit/functional",
    *(f"tests/unit/test_{of}.py" for of in ("joint_objective", "objectives", "neighbor_table", "policy", "estimation")),
    *(f"tests/unit/test_{of}.py" for of in ("ground_set", "constrained_estimation", "free_size", "extreme_numbers")),
]
# 2^24 samples, and what apricot compiles
SLOW_TESTS = [
    "tests/unit/functional/test_plackett_luce.py::test_more_than_2_to_the_24_samples_can_be_drawn_from",
    "tests/unit/functional/test_facility_location.py::test_value_is_that_of_apricot_on_the_same_matrix",
]
# On a CPU nothing can tell these apart: on which device something is, and whether lists of one length are said to be.
UNNOTICEABLE = re.compile(r"(device|strict)=[\w.]+(\([^()]*\)\.device)?")
MAX_DATA_BYTES = 8 * 2**30
POLL_S = 0.01


def changed_modules(modules: Sequence[str]) -> dict[str, list[str]]:
    """Copies package and tests to FOLDER, the modules with all their changes; returns the changes' names by module."""
    for folder in ("datamask_pl", "tests"):
        shutil.rmtree(FOLDER / folder, ignore_errors=True)  # with files that are no longer there
        shutil.copytree(folder, FOLDER / folder)
    for file in ("cli.py", "README.md", "pyproject.toml"):
        shutil.copy(file, FOLDER / file)
    names = {}
    for module in modules:
        mutated = mutate_file_contents(str(FORMULAS / f"{module}.py"), (FORMULAS / f"{module}.py").read_text())
        (FOLDER / FORMULAS / f"{module}.py").write_text(mutated.code)
        names[module] = list(mutated.mutant_names)
    return names


def differences(text: str) -> dict[str, tuple[str, str]]:
    """What each change takes away from a changed module, and what it puts there, by its name."""
    lines = [re.sub(r"\s+# type: ignore # mutmut generated", "", line).strip() for line in text.splitlines()]
    functions = {
        node.name: lines[node.lineno : node.end_lineno]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name
    }
    found = {}
    for name, after in functions.items():
        before = functions[re.sub(r"__mutmut_\d+$", "__mutmut_orig", name)]
        delta = [line for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]
        found[name] = tuple(" ".join(line[2:] for line in delta if line[0] == sign) for sign in "-+")
    return found


def is_unnoticeable(before: str, after: str) -> bool:
    """True if only the device or the strictness of `zip` is another."""
    before, after = (re.sub(r"[\s,]", "", UNNOTICEABLE.sub("", text)) for text in (before, after))
    return before == after


def digest_of(paths: Iterable[Path]) -> str:
    """Of the files' names and contents, whatever their order."""
    contents = [(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(paths)]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """What was written, or nothing."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, content: object) -> None:
    """All of it or nothing."""
    path.with_suffix(".part").write_text(json.dumps(content, indent=0))
    path.with_suffix(".part").replace(path)


def in_a_fork(function: Callable[..., object], *arguments: object) -> None:
    """Runs what may start threads of OpenMP: later forks of a process that has some wait for them for ever."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        has_failed = True
        try:
            function(*arguments)
            has_failed = False
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(int(has_failed))
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("The tests could not be looked at, see above.")


class Mutation:
    """A pytest plugin that runs the collected tests once for each change."""

    def __init__(self, names: dict[str, list[str]], *, seconds: float) -> None:
        self.names = names
        self.seconds = seconds
        self.tests: dict[str, Any] = read_json(Path("tests.json"))
        self.results: dict[str, Any] = read_json(Path("results.json"))
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps what pytest says of a test."""
        self.reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of pytest's own."""
        import hypothesis  # pytest wants to be first

        hypothesis.settings.register_profile(
            "mutation", max_examples=25, database=None, deadline=None, derandomize=True
        )
        hypothesis.settings.load_profile("mutation")
        in_a_fork(self.look_at_tests, session.items)
        self.tests = read_json(Path("tests.json"))
        gc.collect()
        gc.freeze()  # forks share what is not touched
        for module, names in self.names.items():
            self.try_module(module, names, {item.nodeid: item for item in session.items})
        return True

    def run(self, items: Sequence[pytest.Item]) -> pytest.Item | None:
        """Runs tests until one fails; returns that."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.reports = []
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if any(report.failed for report in self.reports):
                return item
        return None

    def look_at_tests(self, items: Sequence[pytest.Item]) -> None:
        """Finds out how long tests take and what they reach, where their file or the package is another than last time.

        Only the modules that carry changes tell that they were reached: with others the package is another, too.
        """
        package = list(Path("datamask_pl").rglob("*.py"))
        digests = {path: digest_of([path, *package]) for path in {item.path for item in items}}
        set_mutant_under_test("stats")
        for item in items:
            if self.tests.get(item.nodeid, {}).get("digest") == digests[item.path]:
                continue
            state()._stats.clear()
            begun = time.process_time()
            if self.run([item]):
                raise SystemExit(f"{item.nodeid} fails without any change.")
            seconds = time.process_time() - begun
            self.tests[item.nodeid] = {
                "digest": digests[item.path], "seconds": seconds, "reaches": sorted(state()._stats)
            }  # fmt: skip
        set_mutant_under_test("")
        write_json(Path("tests.json"), self.tests)

    def try_module(self, module: str, names: Sequence[str], items: dict[str, pytest.Item]) -> None:
        """Tries all changes of a module but those that are known to be noticed."""
        text = (FORMULAS / f"{module}.py").read_text()
        digest, delta = hashlib.sha256(text.encode()).hexdigest(), differences(text)
        known = self.results.get(module, {})
        results = known["of"] if known.get("digest") == digest else {}
        self.results[module] = {"digest": digest, "of": results}
        reaching = defaultdict(list)
        for test in items:
            for function in self.tests[test]["reaches"]:
                reaching[function].append(test)
        of_module = [self.chosen(reaching[function], module) for function in reaching if f".{module}." in function]
        if self.try_change("", [items[test] for test in sorted(set().union(*of_module))]) != "left":
            raise SystemExit(f"{module}: its tests fail without any change, in a fork.")
        for name in names:
            if results.get(name) == "noticed":
                continue
            if is_unnoticeable(*delta[name]):
                results[name] = "device or strict"
                continue
            dotted = f"datamask_pl.functional.{module}.{name}"
            tests = self.chosen(reaching[dotted.rpartition("__mutmut_")[0]], module)
            results[name] = self.try_change(dotted, [items[test] for test in tests]) if tests else "not reached"
            write_json(Path("results.json"), self.results)
        print(f"\n{module}: {dict(Counter(results.values()))}")
        for name, result in results.items():
            if result not in ("noticed", "device or strict"):
                print(f"    {result}: {name}\n        - {delta[name][0]}\n        + {delta[name][1]}", flush=True)

    def chosen(self, tests: Iterable[str], module: str) -> list[str]:
        """The tests of the module, in test_MODULE.py or test_MODULE_*.py, first, then the quickest, as many as fit."""
        in_order = sorted(tests, key=lambda test: (f"/test_{module}" not in test, self.tests[test]["seconds"]))
        total, chosen = 0.0, []
        for test in in_order:
            total += self.tests[test]["seconds"]
            if chosen and total > self.seconds:
                break
            chosen.append(test)
        return chosen

    def try_change(self, name: str, items: Sequence[pytest.Item]) -> str:
        """Runs tests on a change, in a fork."""
        seconds = sum(self.tests[item.nodeid]["seconds"] for item in items)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            is_noticed = True
            try:
                os.setpgid(0, 0)  # with all that the tests start
                limit = int(4 * seconds + 8)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
                resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.dup2(nothing, 2)
                set_mutant_under_test(name)
                is_noticed = self.run(items) is not None
            finally:
                os._exit(int(is_noticed))
        # polls are counted, not seconds: a machine that sleeps, or stops both, is no reason to end the child
        for _ in range(int((10 * seconds + 60) / POLL_S)):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(POLL_S)
        else:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        # what does not come to an end, or ends the process, is noticed, too
        return "left" if status == 0 else "noticed"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in FORMULAS.glob("[a-z]*.py"))
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests that a change is tried with")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.modules) - set(known)):
        parser.error(f"no module of the name {unknown[0]!r}; there are {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True)
    config()  # of this folder's pyproject.toml
    names = changed_modules(options.modules or known)
    os.chdir(FOLDER)
    sys.path.insert(0, os.getcwd())
    set_mutant_under_test("")
    slow = [argument for test in SLOW_TESTS for argument in ("--deselect", test)]
    plugin = Mutation(names, seconds=options.seconds)
    return int(pytest.main(["--rootdir=.", "-s", "-p", "no:cacheprovider", *slow, *TESTS], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
