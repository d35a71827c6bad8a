"""What a file from elsewhere can do: be refused. No code of it is run, nothing imported, nothing written outside."""

import ast
import io
import json
import os
import pickle
import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from datamask_pl.commands.apply import apply
from datamask_pl.data import shards as sources_module
from datamask_pl.errors import CheckpointError, ConfigError
from datamask_pl.io import checkpoints
from datamask_pl.io.checkpoints import STATE_KEY, checkpoint_name, encode, newest_whole_checkpoint, read_checkpoint
from datamask_pl.io.paths import RemotePath
from datamask_pl.mask.manifest import read_complete
from tests.support.fits import ROOT, fit, run_folder, write_shards
from tests.support.writers import prepare_mask, write_filtered

PACKAGE = ROOT / "datamask_pl"
RUNS_CODE = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code"}
CALLS = {"eval", "exec", "compile", "__import__", "add_safe_globals", "safe_globals", "unsafe_load", "system", "popen"}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def trees():
    for path in SOURCES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def called(node):
    function = node.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def test_nothing_that_can_run_code_from_a_file_is_imported():
    for name, tree in trees():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {module.split(".")[0] for module in modules} & RUNS_CODE, name


def test_no_call_runs_code_from_a_file():
    num_loads = 0
    for name, tree in trees():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            # re.compile is no builtin
            is_builtin = isinstance(call.func, ast.Name) or called(call) != "compile"
            assert called(call) not in CALLS or not is_builtin, f"{name} calls {called(call)}"
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert options.get("allow_pickle", "False") == "False", name
            assert options.get("shell", "False") == "False", name
            if ast.unparse(call.func) == "torch.load":
                num_loads += 1
                assert options.get("weights_only") == "True", f"{name} loads more than weights"
    assert num_loads >= 1


def test_only_names_of_this_package_are_imported_by_name():
    users = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) in ("import_module", "import_object", "get_import_path")
    }
    assert users == {"datamask_pl/__init__.py", "datamask_pl/_moved.py", "datamask_pl/cli.py"}


class Trap:
    """Unpickled, it would leave a file behind."""

    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def sealed(content):
    """With the checksum that whoever makes a trap can make, too."""
    body = content[:-2] if content.startswith(b"PK") else content
    return body + checkpoints._ending(memoryview(body))


def _zipped(content):
    """A checkpoint of torch's layout whose pickle is a given one; its checksums are right."""
    buffer = io.BytesIO()
    torch.save({STATE_KEY: {}}, buffer)
    spoilt = io.BytesIO()
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(spoilt, "w") as target:
        for entry in archive.infolist():
            target.writestr(entry.filename, content if entry.filename.endswith("data.pkl") else archive.read(entry))
    return spoilt.getvalue()


def _legacy(content):
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


TRAPS = {
    "a plain pickle": lambda: pickle.dumps({STATE_KEY: Trap()}, protocol=2),
    "a zip file as torch writes it": lambda: _zipped(pickle.dumps({STATE_KEY: {"block": Trap()}}, protocol=2)),
    "the old format of torch": lambda: _legacy({STATE_KEY: Trap()}),
    "the logits": lambda: _legacy({STATE_KEY: {}, "state_dict": {"policy.logits": Trap()}}),
}


@pytest.mark.parametrize("kind", TRAPS)
def test_code_in_a_checkpoint_is_not_run_and_an_older_one_is_taken(workplace, kind):
    older = workplace / checkpoint_name(0, 1)
    older.write_bytes(b"".join(encode({STATE_KEY: {}})))
    newer = workplace / checkpoint_name(0, 2)
    newer.write_bytes(sealed(TRAPS[kind]()))
    with pytest.raises(CheckpointError, match="damaged or was not written by datamask_pl") as caught:
        read_checkpoint(newer)
    assert "checksum" not in str(caught.value)
    with pytest.warns(UserWarning, match="Falling back to the one before"):
        assert newest_whole_checkpoint(workplace, 0, below=9) == older
    assert not Path("trapped").exists()


def test_the_trap_works_where_a_pickle_is_loaded(workplace):
    pickle.loads(TRAPS["a plain pickle"]())
    assert Path("trapped").is_dir()


@pytest.fixture
def evil(workplace, monkeypatch):
    """A module that leaves a file behind when it is imported."""
    (workplace / "evil_module.py").write_text("open('imported', 'w').close()\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(workplace)
    yield "evil_module.Evil"
    assert "evil_module" not in sys.modules
    assert not Path("imported").exists()


def test_class_paths_in_a_mask_are_not_imported(workplace, evil):
    prepare_mask()
    path = Path("mask/_manifest.json")
    content = json.loads(path.read_text())
    content["config"] = {
        "model": {"class_path": evil, "diversity": {"class_path": evil}},
        "trainer": {"callbacks": [evil]},
    }
    content["versions"] = {"evil_module": evil}
    path.write_text(json.dumps(content))
    read_complete(Path("mask"))
    write_filtered()


@pytest.mark.parametrize("named_by", ["--run_name", "folder", "file"])
def test_class_paths_in_a_run_that_is_continued_are_not_imported(workplace, evil, named_by):
    args = ("--data.path", write_shards("shards", [80]), "--data.block_size", "40", "--model.num_steps", "3")
    fit(*args, "--run_name", "mine", "--trainer.max_steps", "4")
    run = run_folder().with_name("mine")
    newest = max((run / "checkpoints").iterdir())
    go_on = {
        "--run_name": ("--run_name", "mine"),
        "folder": ("--ckpt_path", str(run)),
        "file": ("--ckpt_path", str(newest)),
    }[named_by]
    content = json.loads((run / "mask/_manifest.json").read_text())
    content["config"]["model"]["diversity"] = {"class_path": evil}
    (run / "mask/_manifest.json").write_text(json.dumps(content))
    (run / "config.yaml").write_text(f"model: {{diversity: {{class_path: {evil}}}}}\n")
    for path in (run / "checkpoints").iterdir():
        checkpoint = torch.load(path, weights_only=True)
        # what LightningCLI makes options of the model of, where it is given a checkpoint
        checkpoint["hyper_parameters"] = {"_class_path": evil, "diversity": {"class_path": evil}, "_instantiator": evil}
        checkpoint["hparams_name"], checkpoint["callbacks"] = evil, {evil: {}}
        path.write_bytes(b"".join(encode(checkpoint)))
    fit(*args, *go_on)
    assert len(list((run / "mask").glob("part-*"))) == 2


def test_an_extension_type_in_a_parquet_file_is_not_unpickled(workplace):
    """Arrow's old Python extension types were pickles in a file's metadata (CVE-2023-47248)."""
    prepare_mask()
    path = Path("data/a.parquet")
    table = pq.read_table(path)
    name = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Trap())}
    fields = [field.with_metadata(name) if field.name == "chunk_id" else field for field in table.schema]
    pq.write_table(table.cast(pa.schema(fields)), path)
    write_filtered()
    assert not Path("trapped").exists()


@pytest.mark.parametrize("name", ["../../outside.parquet", "/outside.parquet", "~/outside.parquet", "..", ""])
def test_names_in_a_mask_open_and_write_nothing_outside(workplace, name):
    prepare_mask()
    shutil.copytree("mask", "inner/mask")
    path = Path("inner/mask/_manifest.json")
    content = json.loads(path.read_text())
    content["files"] = [name, "b.parquet"]
    content["blocks"]["0"]["part"] = name
    path.write_text(json.dumps(content))
    (workplace / "outside.parquet").write_bytes(b"untouched")
    before = {path for path in workplace.rglob("*") if path.is_file()}
    apply("inner/mask", "data", "inner/filtered")  # by id, for the names are others
    written = {path for path in workplace.rglob("*") if path.is_file()} - before
    assert {str(path.relative_to(workplace)) for path in written} == {
        f"inner/filtered/{name}" for name in ("_apply.json", "a.parquet", "b.parquet")
    }
    assert (workplace / "outside.parquet").read_bytes() == b"untouched"


def test_names_in_the_record_of_apply_count_nothing_outside(workplace, capsys):
    prepare_mask()
    write_filtered()
    shutil.copy("data/a.parquet", "outside.parquet")
    path = Path("filtered/_apply.json")
    record = json.loads(path.read_text())
    record["files"]["../outside.parquet"] = {"num_rows": 100, "num_bytes": Path("outside.parquet").stat().st_size}
    path.write_text(json.dumps(record))
    capsys.readouterr()
    write_filtered()
    assert "kept    2 of 200 rows in 2 files" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["s3://bucket/data/../../x.parquet", "https://host/data/sub/../../../x.parquet"])
def test_names_in_a_remote_listing_do_not_lead_out_of_the_output(monkeypatch, name):
    folder = name.partition("data/")[0] + "data/"
    store = SimpleNamespace(unstrip_protocol=str)
    found = [RemotePath(store, f"{folder}a.parquet"), RemotePath(store, name)]
    monkeypatch.setattr(sources_module, "expand", lambda *_, **__: found)
    with pytest.raises(ConfigError, match="leads out of the folder of its files"):
        sources_module.read_sources("ignored", "chunk_id")


@pytest.mark.parametrize("name", ["../other", "a/b", "..", "/etc", "a/../../b"])
def test_the_name_of_a_run_is_no_path(workplace, capsys, name):
    with pytest.raises(SystemExit) as ended:
        fit("--data.path", "shards", "--run_name", name)
    assert ended.value.code == 2
    assert "must be the name of a folder" in capsys.readouterr().err
    assert list(workplace.iterdir()) == []


def pins(lock):
    """Versions of a lock by name."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / lock).read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


class TestDependencies:
    PROJECT: ClassVar = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    LOCK: ClassVar = pins("requirements-dev.lock")
    # name: versions that must never be installed, and why
    BAD: ClassVar = {
        "lightning": ["2.6.2", "2.6.3"],  # compromised releases
        "pytorch-lightning": ["2.6.2", "2.6.3"],
        "torch": ["2.5.1", "2.9.1"],  # code in a checkpoint: CVE-2025-32434, CVE-2026-24747
        "pyarrow": ["14.0.0"],  # code in a parquet file's metadata: CVE-2023-47248
    }

    @pytest.mark.parametrize("name", BAD)
    def test_known_bad_versions_are_refused(self, name):
        wanted = {req.name: req.specifier for req in map(Requirement, self.PROJECT["dependencies"])}
        for version in self.BAD[name]:
            assert not wanted[name].contains(version, prereleases=True), f"pyproject.toml admits {name} {version}"
            assert Version(self.LOCK[name]) != Version(version)

    def test_the_lock_pins_every_dependency_to_a_version_that_the_project_admits(self):
        extras = [item for items in self.PROJECT["optional-dependencies"].values() for item in items]
        wanted = [*map(Requirement, self.PROJECT["dependencies"])]
        # no test contacts Google's store
        wanted += [requirement for requirement in map(Requirement, extras) if requirement.name != "gcsfs"]
        for requirement in wanted:
            assert requirement.specifier.contains(self.LOCK[requirement.name]), requirement

    @pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
    def test_every_line_of_a_lock_pins_an_exact_version(self, lock):
        lines = [line for line in (ROOT / lock).read_text().splitlines() if not line.startswith("#")]
        assert len(lines) == len(pins(lock))

    def test_the_quickstart_installs_what_the_tests_do(self):
        wanted = {Requirement(text).name for text in self.PROJECT["dependencies"]} | {"scikit-learn"}
        assert wanted <= pins("requirements.lock").keys()
        assert pins("requirements.lock").items() <= self.LOCK.items()
