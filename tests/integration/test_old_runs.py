"""What the version before its folders wrote is still read: runs, checkpoints, masks, configs and module paths."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from datamask_pl import _moved
from datamask_pl.cli import main
from tests.support.fits import ROOT, assert_same_mask, fit, parts, selected_ids
from tests.support.tiers import only

OLD = Path(__file__).parents[1] / "fixtures" / "0.1_before_folders"


@pytest.fixture
def old(workplace):
    """A copy of the old shards and runs, laid out as they were."""
    shutil.copytree(OLD / "shards", "shards")
    shutil.copytree(OLD / "runs", "runs/datamask")
    return workplace


@pytest.mark.parametrize("kind", ["", "_rollouts"])
def test_an_old_checkpoint_resumes_to_the_old_mask(old, kind):
    config = f"runs/datamask/interrupted{kind}/config.yaml"
    assert "datamask_pl.run_logger.RunLogger" in Path(config).read_text()
    fit("--config", config, "--trainer.max_steps", "-1")
    assert_same_mask(f"runs/datamask/interrupted{kind}", f"runs/datamask/whole{kind}", num_parts=3)


def test_an_old_run_that_is_whole_is_left_as_it_is(old, capsys):
    fit("--config", "runs/datamask/whole/config.yaml")
    assert "nothing was left to do" in capsys.readouterr().out
    assert_same_mask("runs/datamask/whole", OLD / "runs/whole", num_parts=3)


def test_an_old_mask_applies(old):
    main(["apply", "--mask", "runs/datamask/whole/mask", "--source", "shards", "--output", "kept"])
    for path in (OLD / "kept").glob("*.parquet"):
        assert pq.read_table(Path("kept") / path.name).equals(pq.read_table(path))
    # an output that was written before is recognised, too
    shutil.copytree(OLD / "kept", "before")
    main(["apply", "--mask", "runs/datamask/whole/mask", "--source", "shards", "--output", "before"])


def test_an_old_mask_is_exported_compared_and_reported(old):
    main(["export", "--mask", "runs/datamask/whole/mask", "--output", "half", "--select_ratio", "0.5"])
    assert sum(map(len, selected_ids(parts("half")))) == 60
    main(["compare", "--run", "runs/datamask/whole"])
    main(["report", "--run", "runs/datamask/whole"])


def test_old_settings_are_those_of_today(old):
    """The mask that today's code learns with the old config is the old one."""
    config = yaml.safe_load(Path("runs/datamask/whole/config.yaml").read_text())
    config["run_name"] = "again"
    config["trainer"]["logger"]["init_args"]["run_name"] = "again"
    Path("config.yaml").write_text(yaml.safe_dump(config))
    fit("--config", "config.yaml")
    assert_same_mask("runs/datamask/again", "runs/datamask/whole", num_parts=3)


@pytest.mark.parametrize("old_path", only("datamask_pl.run_logger", of=_moved.PATHS))
def test_an_old_module_path_is_the_module_of_today(old_path):
    code = f"""
import importlib
old, new = importlib.import_module({old_path!r}), importlib.import_module({_moved.PATHS[old_path]!r})
assert old is new and new.__spec__.name == new.__name__ == {_moved.PATHS[old_path]!r}
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_a_module_that_never_was_is_not_there():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("datamask_pl.nothing")
