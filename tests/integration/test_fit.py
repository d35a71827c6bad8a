"""`fit` from the command line to the mask, in this process."""

import json
import shutil
from decimal import Decimal
from itertools import count

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamask_pl.callbacks import mask_export
from datamask_pl.cli import main
from datamask_pl.data.scaling import ConstantQualityWarning
from datamask_pl.errors import DatamaskWarning
from datamask_pl.mask.manifest import Manifest
from tests.support import oracles
from tests.support.fits import ESTIMATORS, ROOT, fit, manifest, parts, run_folder, selected_ids, write_shards
from tests.support.fits import assert_same_mask as assert_same
from tests.support.shards import make_table, vectors, write

DIVERSITIES = ("facility_location", "pairwise", "disf")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """150 rows in two files."""
    return write_shards(tmp_path_factory.mktemp("shards"), [90, 60])


@pytest.fixture
def blocks(shards, workplace):
    """Arguments for three blocks of 50 rows, 10 of which are kept."""
    return ("--data.path", shards, "--data.block_size", "60", "--model.select_ratio", "0.2")


def write_config(path, **sections):
    path.write_text(yaml.safe_dump(sections))
    return str(path)


class TestTheMask:
    @pytest.mark.parametrize("diversity", DIVERSITIES)
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_every_estimator_keeps_the_budget_of_every_block_and_every_id_once(self, blocks, estimator, diversity):
        fit(*blocks, *ESTIMATORS[estimator], "--model.diversity", diversity)
        tables = parts(run_folder())
        assert [table.num_rows for table in tables] == [50, 50, 50]
        assert [len(ids) for ids in selected_ids(tables)] == [10, 10, 10]
        assert sorted(id_ for table in tables for id_ in table["id"].to_pylist()) == list(range(150))
        for table in tables:
            logit_N = table["logit"].to_numpy()
            assert np.isfinite(logit_N).all()
            assert len(np.unique(logit_N)) > 5  # something was learned
            assert table["probability"].to_numpy().sum(dtype=float) == pytest.approx(10, rel=1e-5)

    @pytest.mark.parametrize(
        "ids",
        [
            pa.array([2**63 - 1 - row for row in range(20)], pa.int64()),
            pa.array([2**64 - 1 - row for row in range(20)], pa.uint64()),
            pa.array([f"<urn:uuid:{row}>" for row in range(20)], pa.string()),
            pa.array([f"ü{row}" for row in range(20)], pa.large_string()),
            pa.array([bytes([row] * 16) for row in range(20)], pa.binary(16)),
            pa.array([bytes([row] * row) for row in range(20)], pa.binary()),
            pa.array([Decimal(f"{10**30 + row}.5") for row in range(20)], pa.decimal128(38, 1)),
            pa.array([10**18 + row for row in range(20)], pa.timestamp("ns")),
            pa.array([f"{row % 3}" for row in range(20)]).dictionary_encode(),
        ],
        ids=lambda ids: str(ids.type).split("<")[0],
    )
    def test_ids_come_back_in_their_exact_type_and_value(self, workplace, ids):
        """Pandas #56678, fink-client #235: 64-bit ids pass through float64 and lose digits."""
        path = write(workplace / "shard.parquet", make_table(20, chunk_id=ids))
        fit("--data.path", path, "--data.block_size", "10", "--model.num_steps", "2")
        column = pa.chunked_array([chunk for table in parts(run_folder()) for chunk in table["id"].chunks])
        assert column.type == ids.type
        assert column.combine_chunks().equals(ids)

    def test_rows_say_which_file_and_row_they_came_from(self, blocks, shards):
        fit(*blocks, "--data.block_by", "row_groups_shuffled", "--model.num_steps", "2")
        rows = [row for table in parts(run_folder()) for row in table.to_pylist()]
        for row in rows:
            first_id = 90 if row["source_file"].endswith("shard-1.parquet") else 0
            assert row["id"] == first_id + row["source_row"]
        assert {row["source_file"].split("/")[-1] for row in rows} == {"shard-0.parquet", "shard-1.parquet"}

    def test_a_file_can_be_a_block(self, blocks):
        fit(*blocks, "--data.block_by", "file", "--model.num_steps", "2")
        assert [len(ids) for ids in selected_ids(parts(run_folder()))] == [18, 12]

    def test_a_ratio_of_one_keeps_everything(self, blocks):
        fit(*blocks, "--model.select_ratio", "1", "--model.num_steps", "2")
        assert [len(ids) for ids in selected_ids(parts(run_folder()))] == [50, 50, 50]

    def test_only_the_weighted_sum_of_the_quality_columns_counts_where_quality_weight_is_one(self, workplace):
        table = make_table(40, edu=pa.array(np.arange(40.0)), fun=pa.array(np.arange(40.0)[::-1] ** 1.2))
        path = write(workplace / "shard.parquet", table)
        config = write_config(
            workplace / "config.yaml",
            data={"path": path, "quality_columns": {"edu": 0.5, "fun": 2.0}},
            model={"quality_weight": 1.0},
        )
        fit("--config", config)
        (part,) = parts(run_folder())
        quality_N = 0.5 * np.arange(40.0) + 2 * np.arange(40.0)[::-1] ** 1.2
        assert part["quality"].to_numpy() == pytest.approx(quality_N, rel=1e-6)
        assert selected_ids([part]) == [sorted(np.argsort(-quality_N)[:4].tolist())]

    @pytest.mark.parametrize("diversity", DIVERSITIES)
    def test_without_calibration_f_is_that_of_the_formula(self, workplace, diversity):
        path = write(workplace / "shard.parquet", make_table(30, dim=8))
        options = ("--model.calibrate", "false", "--model.quality_weight", "0.3", "--model.select_ratio", "0.2")
        fit("--data.path", path, *options, "--model.diversity", diversity, "--data.quality_scaling", "none")
        (part,) = parts(run_folder())
        features_ND = np.array(make_table(30, dim=8)["feature_arr"].to_pylist())
        features_ND /= np.linalg.norm(features_ND, axis=1, keepdims=True)
        value = oracles.objective(
            diversity, features_ND, part["quality"].to_numpy().astype(float), num_selected=6, quality_weight=0.3
        )
        (block,) = manifest(run_folder())["blocks"].values()
        mask_N = part["selected"].to_numpy()
        assert block["mask"]["f"] == pytest.approx(value(mask_N), abs=1e-6)
        terms = block["mask"]["terms"]
        assert terms["quality"] == pytest.approx(part["quality"].to_numpy()[mask_N].mean(), rel=1e-6)
        assert block["mask"]["f"] == pytest.approx(0.3 * terms["quality"] + 0.7 * terms[diversity], rel=1e-12)
        assert block["scales"] == {"quality": 1.0, diversity: 1.0}
        assert block["mask"]["f"] > block["random"]["f"]

    def test_bad_rows_that_are_dropped_are_in_no_part_and_are_counted(self, workplace, capsys):
        features = [None if row == 7 else [0.0] * 4 if row == 3 else [1.0, row, 2.0, -row] for row in range(40)]
        column = vectors(features, pa.list_(pa.float32()))
        path = write(workplace / "shard.parquet", make_table(40, feature_arr=column))
        with pytest.warns(DatamaskWarning, match="dropped 2 of 40 rows; the first is row 3"):
            fit("--data.path", path, "--data.block_size", "20", "--data.on_bad_row", "drop", "--model.num_steps", "2")
        ids = [id_ for table in parts(run_folder()) for id_ in table["id"].to_pylist()]
        assert ids == [row for row in range(40) if row not in (3, 7)]
        blocks = manifest(run_folder())["blocks"]
        assert [block["num_dropped"] for block in blocks.values()] == [2, 0]
        assert [block["num_selected"] for block in blocks.values()] == [2, 2]
        assert "2 bad rows dropped" in capsys.readouterr().out

    def test_constant_quality_is_said_once_and_leaves_the_choice_to_diversity(self, workplace):
        """QuRating: constant scores divide by a zero deviation."""
        table = make_table(60, quality_score=pa.array(np.full(60, 0.7)))
        path = write(workplace / "shard.parquet", table)
        with pytest.warns(ConstantQualityWarning) as seen:
            fit("--data.path", path, "--data.block_size", "20")
        assert len([warning for warning in seen if warning.category is ConstantQualityWarning]) == 1
        for block in manifest(run_folder())["blocks"].values():
            assert block["scales"]["quality"] == 0
            assert block["mask"]["f"] > block["random"]["f"]


class TestManifest:
    def test_it_says_what_the_parts_belong_to(self, blocks, shards):
        fit(*blocks, "--model.num_steps", "3")
        whole = manifest(run_folder())
        assert whole["format"] == 1
        assert whole["num_blocks"] == 3
        assert len(whole["plan_hash"]) == 64
        assert [name.split("/")[-1] for name in whole["files"]] == ["shard-0.parquet", "shard-1.parquet"]
        assert whole["settings"]["model.select_ratio"] == 0.2
        assert whole["settings"]["objective"].startswith("0.5 * quality() + 0.5 * facility_location(")
        assert set(whole["versions"]) == {"python", "datamask_pl", "torch", "lightning", "pyarrow", "numpy"}
        assert whole["config"]["data"]["path"] == shards
        assert whole["config"]["model"]["num_steps"] == 3
        assert list(whole["blocks"]) == ["0", "1", "2"]
        for index, block in whole["blocks"].items():
            assert block["part"] == f"part-0000{index}.parquet"
            assert (block["num_samples"], block["num_selected"], block["num_steps"]) == (50, 10, 3)
            assert set(block["mask"]["terms"]) == {"quality", "facility_location"}
            assert block["mask"]["f"] > block["random"]["f"]
            assert block["mask"]["f"] > block["top_quality"]["f"]
            assert block["seconds"] > 0

    def test_of_many_blocks_it_is_written_in_a_share_of_the_time_and_at_the_end(self, workplace, monkeypatch):
        """It is written whole: after every block, ten thousand would write forty gigabytes."""
        write_manifest, listed, clock = Manifest.write, [], count()

        def write_for_a_second(manifest, folder):
            write_manifest(manifest, folder)
            listed.append(len(manifest.blocks))

        monkeypatch.setattr(Manifest, "write", write_for_a_second)
        # every look at the clock is a second later: a write takes one, and so do the other blocks
        monkeypatch.setattr(mask_export, "monotonic", lambda: float(next(clock)))
        path = write_shards(workplace / "shards", [60])
        fit("--data.path", path, "--data.block_size", "2", "--model.select_ratio", "0.5", "--model.num_steps", "1")
        assert listed == [0, 20, 30]
        assert len(manifest(run_folder())["blocks"]) == 30

    def test_jobs_of_a_shard_complete_it_together(self, blocks, workplace):
        fit(*blocks, "--model.num_steps", "2", "--mask.output", "whole")
        for index, listed in ((1, ["1"]), (0, ["0", "1", "2"])):
            fit(*blocks, "--model.num_steps", "2", "--mask.output", "mask", "--data.shard", f"{index}/2")
            assert list(manifest(workplace / "mask")["blocks"]) == listed
        assert_same(workplace / "mask", workplace / "whole", num_parts=3)
        assert manifest(workplace / "mask")["num_blocks"] == 3


class TestLog:
    SHARED = ("objective/f", "objective/quality", "policy/undecided", "policy/churn", "policy/lr")

    @pytest.mark.parametrize(
        ("estimator", "own"),
        [
            ("multilinear", ("objective/facility_location/truncation_bound",)),
            (
                "group_relative",
                (
                    "objective/f_best",
                    "policy/advantage_spread",
                    "policy/reward_spread",
                    "policy/groups_without_spread",
                ),
            ),
        ],
    )
    def test_first_and_last_step_of_every_block_are_logged_whatever_the_interval(self, blocks, estimator, own):
        """careamics #837: the log interval exceeds the steps and nothing is logged."""
        fit(*blocks, *ESTIMATORS[estimator], "--trainer.log_every_n_steps", "50")
        events = EventAccumulator(str(run_folder())).Reload()
        tags = {*self.SHARED, "objective/facility_location", "speed/samples_per_second", *own}
        results = {"result/f", "result/quality", "result/facility_location"}
        assert set(events.Tags()["scalars"]) == tags | results
        for tag in tags:
            assert [event.step for event in events.Scalars(tag)] == [1, 6, 7, 12, 13, 18], tag
        rates = [event.value for event in events.Scalars("policy/lr")]
        assert rates == pytest.approx([4.0, 1.5] * 3, rel=1e-6)

    def test_the_interval_counts_the_steps_of_a_block(self, blocks):
        fit(*blocks, "--model.num_steps", "6", "--trainer.log_every_n_steps", "2", "--trainer.max_epochs", "1")
        events = EventAccumulator(str(run_folder())).Reload()
        assert [event.step for event in events.Scalars("objective/f")] == [1, 2, 4, 6]

    def test_the_terminal_shows_the_mask_beside_others_and_where_it_is(self, blocks, capsys):
        fit(*blocks, "--model.num_steps", "2")
        out = capsys.readouterr().out
        assert "150 samples in 3 blocks, 1 process on cpu" in out
        assert "kept 30 of 150 samples in 3 blocks" in out
        for label in ("mask", "random", "top quality", "watch"):
            assert f"\n{label} " in out
        assert str(run_folder() / "mask") + " (3 parts)" in out


class TestConfiguration:
    def test_the_config_that_a_run_writes_gives_the_same_mask_in_a_folder_of_its_own(self, blocks):
        """lightning #17115: a rerun aborts because config.yaml exists."""
        fit(*blocks, "--model.diversity", "pairwise", "--data.seed", "3")
        fit("--config", str(run_folder() / "config.yaml"))
        assert_same(run_folder(version=1), run_folder(), num_parts=3)
        assert (run_folder(version=1) / "config.yaml").read_text() == (run_folder() / "config.yaml").read_text()

    def test_what_print_config_prints_runs_the_same(self, blocks, workplace, capsys):
        """lightning #11252: what --print_config prints does not run."""
        options = (*blocks, "--model.diversity", "disf", "--model.num_steps", "3")
        fit(*options)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["fit", *options, "--print_config"])
        assert not ended.value.code
        (workplace / "printed.yaml").write_text(capsys.readouterr().out)
        fit("--config", "printed.yaml")
        assert_same(run_folder(version=1), run_folder(), num_parts=3)

    def test_of_config_and_command_line_the_later_wins(self, blocks, workplace):
        """lightning #17533: command line against config file."""
        config = write_config(workplace / "config.yaml", model={"select_ratio": 0.1, "num_steps": 2})
        fit(*blocks, "--config", config, "--model.select_ratio", "0.4")
        fit(*blocks, "--model.select_ratio", "0.4", "--config", config)
        kept = [[len(ids) for ids in selected_ids(parts(run_folder(version=version)))] for version in (0, 1)]
        assert kept == [[20, 20, 20], [5, 5, 5]]

    def test_of_two_configs_the_later_wins(self, blocks, workplace):
        one = write_config(workplace / "one.yaml", model={"select_ratio": 0.1, "num_steps": 2})
        two = write_config(workplace / "two.yaml", model={"select_ratio": 0.4})
        fit(*blocks, "--config", one, "--config", two)
        assert [len(ids) for ids in selected_ids(parts(run_folder()))] == [20, 20, 20]
        assert {block["num_steps"] for block in manifest(run_folder())["blocks"].values()} == {2}

    def test_variables_of_the_environment_are_options(self, shards, workplace, monkeypatch):
        """lightning #18874: environment overrides do nothing by default."""
        monkeypatch.setenv("DATAMASK_FIT__DATA__PATH", shards)
        monkeypatch.setenv("DATAMASK_FIT__MODEL__SELECT_RATIO", "0.3")
        fit("--model.num_steps", "2")
        assert [len(ids) for ids in selected_ids(parts(run_folder()))] == [45]
        fit("--model.num_steps", "2", "--model.select_ratio", "0.4")
        assert [len(ids) for ids in selected_ids(parts(run_folder(version=1)))] == [60]

    @pytest.mark.parametrize("how", ["yaml", "command line"])
    def test_callbacks_of_the_user_join_ours(self, blocks, workplace, how):
        """lightning #15256: a user's trainer.callbacks silently replaces the project's own."""
        callback = {"class_path": "tests.support.callbacks.CountsSteps", "init_args": {"path": "steps.txt"}}
        config = write_config(workplace / "config.yaml", trainer={"callbacks": [callback]})
        options = ("--config", config) if how == "yaml" else ("--trainer.callbacks+", json.dumps(callback))
        fit(*blocks, "--model.num_steps", "2", *options)
        assert len(parts(run_folder())) == 3
        assert len(list((run_folder() / "checkpoints").iterdir())) == 2
        assert (workplace / "steps.txt").read_text() == "6"
        assert "CountsSteps" in (run_folder() / "config.yaml").read_text()

    @pytest.mark.parametrize("name", ["quickstart", "fineweb", "paper"])
    def test_the_configs_that_come_with_the_project_run(self, blocks, name):
        small = ("--model.num_steps", "3", "--model.num_rollouts", "4", "--data.partial", "0.5")
        fit("--config", str(ROOT / "configs" / f"{name}.yaml"), *blocks, *(small if name == "paper" else ()))
        tables = parts(run_folder(name=name))
        assert sum(table.num_rows for table in tables) == 150
        assert [len(ids) for ids in selected_ids(tables)] == [10] * 3

    def test_every_config_is_tested(self):
        assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {"quickstart", "fineweb", "paper"}

    def test_a_run_without_a_logger_writes_its_mask_to_the_root_folder(self, blocks, workplace):
        fit(*blocks, "--model.num_steps", "2", "--trainer.logger", "false", "--trainer.default_root_dir", "here")
        assert len(parts(workplace / "here")) == 3

    def test_a_version_that_is_asked_for_is_used(self, blocks):
        options = ("--trainer.logger", "RunLogger", "--trainer.logger.version", "mine")
        fit(*blocks, "--model.num_steps", "2", *options)
        assert len(parts(run_folder().with_name("mine"))) == 3


class TestObjectives:
    @pytest.mark.filterwarnings("ignore:all rollouts of a step:UserWarning")  # this one is soon solved
    def test_an_objective_of_the_users_own_needs_only_a_value(self, blocks, workplace):
        diversity = {"class_path": "tests.support.objectives.EvenRows", "init_args": {"scale": 2.0}}
        config = write_config(workplace / "config.yaml", model={"diversity": diversity, "quality_weight": 0.0})
        fit(
            *blocks, "--config", config, *ESTIMATORS["group_relative"], "--data.partial", "1", "--model.num_steps", "20"
        )
        for block in manifest(run_folder())["blocks"].values():
            assert block["mask"]["terms"]["EvenRows"] >= 1.5  # of 2; a random mask has 1

    def test_its_class_path_can_stand_on_the_command_line(self, blocks):
        fit(*blocks, "--model.diversity", "tests.support.objectives.EvenRows", *ESTIMATORS["leave_one_out"])
        assert manifest(run_folder())["settings"]["objective"].startswith("0.5 * quality() + 0.5 * EvenRows(")

    def test_a_weighted_list_is_a_weighted_sum(self, blocks, workplace):
        diversity = [
            {"objective": "facility_location", "weight": 3.0},
            {"objective": {"class_path": "datamask_pl.objectives.DiSF", "init_args": {"standardize": True}}},
        ]
        config = write_config(workplace / "config.yaml", model={"diversity": diversity, "quality_weight": 0.2})
        fit(*blocks, "--config", config, "--model.calibrate", "false")
        for block in manifest(run_folder())["blocks"].values():
            terms = block["mask"]["terms"]
            assert set(terms) == {"quality", "facility_location", "disf"}
            f = 0.2 * terms["quality"] + 0.6 * terms["facility_location"] + 0.2 * terms["disf"]
            assert block["mask"]["f"] == pytest.approx(f, rel=1e-12)

    def test_a_term_of_a_list_may_be_of_the_users_own(self, blocks, workplace):
        diversity = [{"objective": "pairwise"}, {"objective": {"class_path": "tests.support.objectives.EvenRows"}}]
        config = write_config(workplace / "config.yaml", model={"diversity": diversity})
        fit(*blocks, "--config", config, *ESTIMATORS["group_relative"])
        fit("--config", str(run_folder() / "config.yaml"))
        assert_same(run_folder(version=1), run_folder(), num_parts=3)


class TestPatience:
    def test_a_settled_block_takes_fewer_steps_and_the_run_goes_on(self, blocks):
        fit(*blocks, "--model.num_steps", "50", "--model.patience", "3")
        steps = [block["num_steps"] for block in manifest(run_folder())["blocks"].values()]
        assert len(steps) == 3
        assert all(3 <= num_steps < 50 for num_steps in steps)
        events = EventAccumulator(str(run_folder())).Reload()
        logged = [event.step for event in events.Scalars("objective/f")]
        # every block has its own range of steps, whichever group of ranks solves it
        assert logged[-1] == 2 * 50 + steps[-1]


def test_a_run_leaves_a_folder_that_holds_just_what_the_documentation_says(blocks):
    fit(*blocks, "--model.num_steps", "4")
    names = sorted(path.name for path in run_folder().iterdir())
    assert [name for name in names if not name.startswith("events.")] == ["checkpoints", "config.yaml", "mask"]
    assert sum(name.startswith("events.") for name in names) == 1
    mask = sorted(path.name for path in (run_folder() / "mask").iterdir())
    assert mask == ["_manifest.json", "part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    checkpoints = sorted(path.name for path in (run_folder() / "checkpoints").iterdir())
    assert checkpoints == ["block-00002-step-000003.ckpt", "block-00002-step-000004.ckpt"]


def test_a_checkpoint_holds_tensors_and_plain_types_alone(blocks):
    """pytorch_tabular #621: resume fails under weights_only."""
    fit(*blocks, "--model.num_steps", "4", "--model.patience", "2")
    for path in (run_folder() / "checkpoints").iterdir():
        assert torch.load(path, weights_only=True)["datamask_pl"]["version"] == 1


def test_a_copy_of_the_data_under_another_path_gives_the_same_mask(blocks, shards, workplace):
    shutil.copytree(shards, workplace / "copy")
    fit(*blocks, "--model.num_steps", "3")
    fit(*blocks, "--model.num_steps", "3", "--data.path", "copy")
    for table, other in zip(parts(run_folder()), parts(run_folder(version=1)), strict=True):
        assert table.drop_columns("source_file").equals(other.drop_columns("source_file"))
    assert json.loads((run_folder() / "mask/_manifest.json").read_text())["num_blocks"] == 3
