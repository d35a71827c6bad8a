"""What a user's mistake looks like: one line that names the remedy, an exit code, and nothing written."""

import re
import signal
import time

import numpy as np
import pyarrow as pa
import pytest
import torch

from datamask_pl import cli
from datamask_pl.cli import main
from tests.support.fits import (
    ESTIMATORS,
    assert_same_mask,
    files_below,
    fit,
    parts,
    run,
    run_folder,
    start,
    write_shards,
)
from tests.support.shards import make_table, vectors, write
from tests.support.tiers import only


@pytest.fixture
def data(workplace):
    """Two shards, in three blocks of 20 rows each."""
    return ("--data.path", write_shards("shards", [40, 20]), "--data.block_size", "20", "--model.num_steps", "4")


class Refusal:
    """Runs `fit` in this process, and holds it to what is promised of an error."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self.capsys = capsys

    def __call__(self, *needed, args, command=fit):
        before = files_below(self.folder)
        with pytest.raises(SystemExit) as ended:
            command(*args)
        captured = self.capsys.readouterr()
        assert ended.value.code == 2
        assert captured.err.startswith("error: "), captured.err
        assert captured.err.count("\n") == 1, captured.err
        for text in needed:
            assert text in captured.err
        assert files_below(self.folder) == before
        return captured.err


@pytest.fixture
def refused(workplace, capsys):
    return Refusal(workplace, capsys)


def shard_with(**columns):
    return ("--data.path", write(_path("bad.parquet"), make_table(20, dim=4, **columns)))


def _path(name):
    from pathlib import Path

    return Path(name)


def features_with(row, value):
    features = [[1.0, 2.0, 3.0, float(index)] for index in range(20)]
    features[row] = value
    return vectors(features, pa.list_(pa.float32()))


class TestOptions:
    @pytest.mark.parametrize(
        ("args", "needed"),
        [
            (("--model.select_ratio", "0.01"), ("select_ratio keeps 0 of 20", "raise it to at least 0.025")),
            (("--model.select_ratio", "0"), ("select_ratio must be above 0", "0.0")),
            (("--model.select_ratio", "1.5"), ("at most 1", "1.5")),
            (("--model.quality_weight", "2"), ("model.quality_weight must be from 0 to 1, got 2.0",)),
            (("--config", "no.yaml"), ("config: File does not exist",)),
            (("--model.shiny", "1"), ("--model.shiny", "fit --help")),
            (
                ("--model.estimator", "reinforce"),
                ("model.estimator must be one of 'multilinear', 'leave_one_out', 'group_relative'; got reinforce",),
            ),
            (("--model.diversity", "variety"), ("variety", "'facility_location', 'pairwise', 'disf'")),
            (
                ("--model.diversity", "variety"),
                ("model.diversity must be one of 'fac", "or the class path", "or a list of {"),
            ),
            (("--model.diversity", "no_such_module.Mine"), ("No module named 'no_such_module'; got no_such_module",)),
            (
                ("--model.diversity", '[{"objective": "disf", "wait": 2}]'),
                ("diversity: an entry of the", "'wait'"),
            ),
            (("--model.diversity", '[{"objective": "dsf"}]'), ("list: objective must be one of 'fac", "got dsf")),
            (("--model.diversity", '[{"objective": "disf", "weight": "a"}]'), ("weight must be float; got a",)),
            (("--model.diversity", "tests.support.objectives.NoSuchClass"), ("NoSuchClass",)),
            (
                ("--model.diversity", "tests.support.objectives.EvenRows"),
                ("EvenRows", "group_relative or leave_one_out"),
            ),
            (("--model.num_rollouts", "1"), ("model.num_rollouts must be at least 2", "got 1")),
            (("--model.num_steps", "0"), ("model.num_steps must be at least 1",)),
            (("--model.num_steps", "many"), ("model.num_steps must be int, or null; got many",)),
            (("--model.min_lr", "5"), ("model.max_lr must be at least min_lr (5.0), got 4.0",)),
            (("--model.patience", "0"), ("model.patience must be at least 1",)),
            (("--model.min_churn", "2"), ("model.min_churn must be from 0 to 1",)),
            (("--checkpoint.every_n_steps", "0"), ("checkpoint.every_n_steps must be at least 1",)),
            (("--checkpoint.keep", "0"), ("checkpoint.keep must be at least 1",)),
            (("--data.seed", "-1"), ("data.seed must be at least 0",)),
            (("--data.partial", "0"), ("data.partial must be above 0",)),
            (("--data.block_size", "0"), ("data.block_size must be at least 1",)),
            (("--data.quality_columns", "{}"), ("data.quality_columns must name at least one",)),
            (("--data.quality_columns", "{quality_score: high}"), ("data.quality_columns", "high", "float")),
            (("--trainer.precision", "bf16-mixed"), ("trainer.precision must be 32-true", "bf16-mixed", "float16")),
            (("--trainer.fast_dev_run", "true"), ("trainer.fast_dev_run is not supported", "--model.num_steps 2")),
            (("--trainer.accelerator", "abacus"), ("abacus", "cpu", "cuda")),
            (("--trainer.strategy", "luck"), ("luck", "ddp")),
            (("--trainer.devices", "many"), ("trainer: ", "devices", "int > 0")),
            (("--trainer.accumulate_grad_batches", "2"), ("accumulate_grad_batches",)),
            (("--trainer.enable_checkpointing", "false"), ("enable_checkpointing",)),
            (("--ckpt_path", "last"), ("--ckpt_path last", "no run in runs/datamask has a checkpoint")),
            (("--ckpt_path", "no.ckpt"), ("no.ckpt does not exist", "last")),
            (
                ("--ckpt_path", "last", "--trainer.logger", "false"),
                ("--run_name and --ckpt_path need a trainer.logger",),
            ),
            (
                ("--run_name", "a/b"),
                ("--run_name must be the name of a folder, got 'a/b'", "trainer.logger has its path"),
            ),
            (("--run_name", ".."), ("--run_name must be the name of a folder, got '..'",)),
            (("--run_name", "/tmp"), ("--run_name must be the name of a folder",)),
            (("--run_name", "a", "--trainer.logger", "false"), ("--run_name and --ckpt_path need a trainer.logger",)),
            (("--run_name", "a", "--ckpt_path", "last"), ("--run_name continues by itself", "give either")),
            (("--data.shard", "3/3"), ("data.shard must be i/n with i from 0 to n - 1", "got '3/3'")),
            (("--launch.ranks_per_block", "0"), ("launch.ranks_per_block must be at least 1, got 0",)),
            (("--launch.timeout_s", "0"), ("launch.timeout_s must be above 0 and at most 2.592e+06, got 0.0",)),
            (
                ("--preemption.signal", "USR1"),
                ("preemption.signal must be a signal's name such as SIGUSR1, got 'USR1'",),
            ),
            (("--config", "no.yaml"), ("no.yaml", "does not exist")),
            (
                (*ESTIMATORS["group_relative"], "--data.partial", "0.01"),
                ("data.partial", "0.01 of a block of 20 samples", "keeps 0 of 1"),
            ),
        ],
        ids=lambda value: " ".join(value)[:60],
    )
    def test_an_option_that_cannot_work_is_refused(self, refused, data, args, needed):
        refused(*needed, args=(*data, *args))

    @pytest.mark.parametrize(
        ("text", "needed"),
        [
            (b"data: [\n", "parsing"),
            (b"model:\n  shiny: 1\n", "model.shiny"),
            (b"hello", "hello"),
            (b"\xff\xfe\x00", "YAML"),
            (b"model: 5\n", "model must be options by name, such as {name: value}, got 5"),
            (b"trainer: []\n", "trainer must be options by name"),
            (b"launch: null\n", "launch must be options by name"),
            (b'model: "\\0"\n', "a path holds a zero byte"),
        ],
    )
    def test_a_config_that_cannot_be_read_is_refused(self, refused, data, workplace, text, needed):
        (workplace / "config.yaml").write_bytes(text)
        refused(needed, args=(*data, "--config", "config.yaml"))

    def test_a_variable_with_a_bad_value_is_refused(self, refused, data, monkeypatch):
        monkeypatch.setenv("DATAMASK_FIT__MODEL__SELECT_RATIO", "7")
        refused("select_ratio must be above 0 and at most 1, got 7.0", args=data)

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("DATAMASK_FIT__MODEL__SELECT_RATO", "the nearest is DATAMASK_FIT__MODEL__SELECT_RATIO"),
            ("DATAMASK_FIT_MODEL_SELECT_RATIO", "the nearest is DATAMASK_FIT__MODEL__SELECT_RATIO"),
            ("DATAMASK_MODEL__SELECT_RATIO", "the nearest is DATAMASK_FIT__MODEL__SELECT_RATIO"),
            ("DATAMASK_FIT__model__select_ratio", "the nearest is DATAMASK_FIT__MODEL__SELECT_RATIO"),
            ("DATAMASK_RUN_NAME", "the nearest is DATAMASK_FIT__RUN_NAME"),
            ("DATAMASK_FIT__UTTERLY_UNRELATED_WORDS", "python cli.py fit --help lists them"),
        ],
    )
    def test_a_variable_that_is_no_option_is_refused_with_the_nearest(self, refused, data, monkeypatch, name, nearest):
        monkeypatch.setenv(name, "0.2")
        refused(f"the environment has {name}, which is not an option of fit; {nearest}; correct its name", args=data)

    def test_what_is_missing_because_its_variable_is_misspelt_is_said_so(self, refused, monkeypatch):
        monkeypatch.setenv("DATAMASK_FIT__DATA__PTH", "shards")
        refused("DATAMASK_FIT__DATA__PTH", "the nearest is DATAMASK_FIT__DATA__PATH", args=())

    def test_a_variable_of_the_users_own_is_left_alone(self, data, monkeypatch):
        monkeypatch.setenv("DATAMASK_ROOT", "/data")
        monkeypatch.setenv("DATAMASK_CONFIG_DIR", "/etc")
        monkeypatch.setenv("DATAMASK_SUBCOMMAND", "fit")
        fit(*data)
        assert len(parts(run_folder())) == 3

    def test_every_variable_that_the_help_lists_is_an_option(self, data, monkeypatch, capsys):
        """Oracle: the lines of jsonargparse's own help."""
        with pytest.raises(SystemExit):
            cli._run("fit", ["--help"], is_from_shell=False)
        names = re.findall(r"ENV: +(DATAMASK_\w+)", capsys.readouterr().out)
        assert len(names) > 80
        for name in names:
            monkeypatch.setenv(name, "no such value")
        with pytest.raises(SystemExit):
            fit(*data)
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert "no option of fit" not in err

    def test_a_pattern_without_quotes_is_explained(self, refused, data):
        refused("quotes", args=("--data.path", "shards/shard-0.parquet", "shards/shard-1.parquet"))

    def test_fit_without_data_is_told_what_it_needs(self, refused):
        refused("data.path", args=())

    def test_an_unknown_command_is_answered_with_the_commands(self, refused):
        refused("'fitt'", "fit", "embed", "sample", args=(["fitt"],), command=main)

    @pytest.mark.parametrize(
        ("class_name", "needed"),
        [
            ("NotANumberAfter", ("NotANumberAfter returned nan", "in calibration")),
            ("WrongShape", ("WrongShape returned shape ()", "one number a mask")),
        ],
    )
    def test_an_objective_that_fails_at_once_is_named(self, data, workplace, capsys, class_name, needed):
        with pytest.raises(SystemExit) as ended:
            fit(*data, *ESTIMATORS["group_relative"], "--model.diversity", f"tests.support.objectives.{class_name}")
        err = capsys.readouterr().err
        assert ended.value.code == 2
        assert err.startswith("error: objective ")
        assert err.count("\n") == 1
        assert all(text in err for text in needed)
        assert not parts(run_folder())


class TestData:
    def test_a_path_that_matches_nothing(self, refused):
        refused("nothing matches 'nowhere/*.parquet'", args=("--data.path", "nowhere/*.parquet"))

    @pytest.mark.parametrize("option", ["id_column", "feature_column"])
    def test_a_column_that_is_not_there(self, refused, data, option):
        needed = ("shard-0.parquet has no column 'wrong'", "chunk_id, quality_score, feature_arr")
        refused(*needed, args=(*data, f"--data.{option}", "wrong"))

    def test_a_quality_column_that_is_not_there(self, refused, data):
        refused("has no column 'wrong'", args=(*data, "--data.quality_columns", "{wrong: 1.0}"))

    @pytest.mark.parametrize(
        ("columns", "needed"),
        [
            (lambda: {"feature_arr": features_with(3, [1.0, np.nan, 0.0, 0.0])}, ("row 3", "element 1 is nan")),
            (lambda: {"feature_arr": features_with(4, [0.0] * 4)}, ("row 4", "zero")),
            (lambda: {"feature_arr": features_with(5, [1.0, 2.0])}, ("row 5", "4 elements", "it has 2")),
            (lambda: {"feature_arr": features_with(6, None)}, ("row 6", "null")),
            (lambda: {"quality_score": pa.array([1.0] * 19 + [np.nan])}, ("row 19", "'quality_score'", "nan")),
            (lambda: {"quality_score": pa.array(["good"] * 20)}, ("'quality_score'", "string")),
            (lambda: {"chunk_id": pa.array([1] * 19 + [None], pa.int64())}, ("row 19", "'chunk_id'", "null")),
        ],
        ids=["nan feature", "zero vector", "ragged", "null vector", "nan quality", "text quality", "null id"],
    )
    def test_a_row_that_cannot_be_used(self, refused, columns, needed):
        refused("bad.parquet", *needed, args=shard_with(**columns()))

    @pytest.mark.parametrize(
        ("spoil", "needed"),
        [
            (lambda content: content[: len(content) // 2], "cut off"),
            (lambda content: content[:-6], "cut off"),
            (lambda content: b"", "0 bytes"),
            (lambda content: b"chunk_id,quality_score\n1,2\n", "not a parquet file"),
        ],
        ids=["half", "six bytes", "empty", "text"],
    )
    def test_a_file_that_is_not_whole(self, refused, data, workplace, spoil, needed):
        """All files are looked at before anything is written."""
        path = workplace / "shards/shard-1.parquet"
        path.write_bytes(spoil(path.read_bytes()))
        refused("shard-1.parquet", needed, args=data)


class TestContinuing:
    """A run of other settings or other data is never continued, whether it was finished or only begun."""

    @pytest.fixture(params=only("finished", of=["finished", "begun", "within the first block"]))
    def run_of(self, request, data, capsys):
        steps = {
            "finished": (),
            "begun": ("--trainer.max_steps", "6"),
            "within the first block": ("--trainer.max_steps", "2"),
        }
        fit(*data, *steps[request.param], "--run_name", "mine", "--checkpoint.every_n_steps", "1")
        capsys.readouterr()
        return request.param

    @pytest.mark.parametrize(
        ("args", "needed"),
        [
            (("--model.select_ratio", "0.2"), "model.select_ratio is 0.1 there and 0.2 here"),
            (("--model.num_steps", "9"), "model.num_steps is 4 there and 9 here"),
            (("--model.diversity", "disf"), "disf(standardize=False)"),
            (("--data.seed", "5"), "other data"),
            (("--data.block_size", "30"), "other data"),
            (("--data.quality_scaling", "minmax"), "other data"),
        ],
        ids=lambda value: value[0] if isinstance(value, tuple) else "",
    )
    @pytest.mark.parametrize("how", [("--run_name", "mine"), ("--ckpt_path", "last")], ids=lambda how: how[0])
    def test_one_of_other_settings_or_data(self, refused, data, run_of, how, args, needed):
        refused(needed, "another --run_name", args=(*data, *args, *how))

    @pytest.mark.parametrize(
        ("path", "needed"),
        [
            ("last", "--ckpt_path last: no run in runs/datamask has a checkpoint; start without --ckpt_path"),
            ("runs/datamask/version_7/checkpoints/block-00000-step-000001.ckpt", "does not exist"),
            ("nowhere", "checkpoint nowhere does not exist; pass the path of a .ckpt file, or last"),
            ("x" * 300, "does not exist"),
        ],
        ids=["last", "a checkpoint", "a folder", "a long name"],
    )
    @pytest.mark.parametrize(
        "others", [(), ("runs/datamask/version_0",), ("runs/other/version_0/mask/part-00000.parquet",)]
    )
    def test_a_checkpoint_that_is_not_there(self, refused, data, workplace, path, needed, others):
        """lightning #18524: `--ckpt_path last` without a checkpoint trains from scratch and ends well."""
        for other in others:
            (workplace / other).mkdir(parents=True)
        refused(needed, args=(*data, "--ckpt_path", path))

    @pytest.mark.parametrize("content", ["half", "text", "empty", "list", "other dict"])
    def test_a_checkpoint_that_is_damaged_or_foreign(self, refused, data, workplace, capsys, content):
        fit(*data)
        capsys.readouterr()
        last = sorted((run_folder() / "checkpoints").iterdir())[-1]
        path = workplace / "given.ckpt"
        if content in ("list", "other dict"):
            torch.save([1] if content == "list" else {"state_dict": {}}, path)
        else:
            path.write_bytes({"half": last.read_bytes()[:1500], "text": b"hello", "empty": b""}[content])
        refused("given.ckpt", "datamask_pl", args=(*data, "--ckpt_path", str(path)))

    @pytest.mark.parametrize("place", ["elsewhere/block-00000-step-000001.ckpt", "checkpoints/best.ckpt"])
    def test_a_checkpoint_that_is_not_where_it_was_written(self, refused, data, workplace, capsys, place):
        fit(*data)
        capsys.readouterr()
        path = run_folder() / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sorted((run_folder() / "checkpoints").iterdir())[-1].read_bytes())
        refused(place, "is not in a run's checkpoints folder", args=(*data, "--ckpt_path", str(path)))


class TestMaskFolder:
    def test_one_that_holds_the_mask_of_other_data(self, refused, data, capsys):
        fit(*data, "--mask.output", "mask")
        capsys.readouterr()
        needed = (
            "mask holds the mask of other data: data.block_size is 20 there and 30 here. Pass another --run_name",
        )
        refused(*needed, args=(*data, "--mask.output", "mask", "--data.block_size", "30"))
        write_shards("shards", [60, 31])
        needed = ("mask holds the mask of other data: files were added, removed or rewritten",)
        refused(*needed, args=(*data, "--mask.output", "mask"))

    def test_one_that_was_made_with_other_options(self, refused, data, capsys):
        fit(*data, "--mask.output", "mask")
        capsys.readouterr()
        needed = ("part-00000.parquet was made with other options: model.max_lr is 4.0 there and 3.0 here",)
        refused(*needed, args=(*data, "--mask.output", "mask", "--model.max_lr", "3"))

    def test_one_with_a_damaged_manifest(self, refused, data, workplace):
        (workplace / "mask").mkdir()
        (workplace / "mask/_manifest.json").write_text('{"format": 1')
        refused("mask/_manifest.json cannot be read", args=(*data, "--mask.output", "mask"))

    def test_one_that_is_a_file(self, refused, data, workplace):
        (workplace / "mask").write_text("")
        refused("mask/_manifest.json cannot be written", "not a folder", args=(*data, "--mask.output", "mask"))


class TestProcess:
    """The same through a process of its own."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("args", "needed"),
        [
            (("--data.path", "nowhere"), "nothing matches 'nowhere'"),
            (("--data.path", "shards", "--model.select_ratio", "0.001"), "raise it to at least"),
            (("--data.path", "shards", "--ckpt_path", "last"), "no run in runs/datamask has a checkpoint"),
        ],
        ids=["path", "ratio", "checkpoint"],
    )
    def test_one_line_on_stderr_and_nothing_written(self, data, workplace, args, needed):
        before = files_below(workplace)
        code, out, err = run(*args, folder=workplace)
        assert code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert needed in err
        assert files_below(workplace) == before

    @pytest.mark.slow
    def test_an_interrupted_run_ends_without_a_traceback_and_resumes_as_if_it_had_not_been(self, workplace):
        path = write_shards("shards", [300, 300])
        args = ("--data.path", path, "--data.block_size", "200", "--model.num_steps", "60", "--model.max_lr", "0.5")
        fit(*args, "--mask.output", "undisturbed", "--trainer.logger", "false", "--trainer.default_root_dir", "other")
        process = start(*args, "--checkpoint.every_n_steps", "1", folder=workplace)
        folder = run_folder() / "checkpoints"
        try:
            deadline_s = time.monotonic() + 300
            while not list(folder.glob("block-00001-*.ckpt")):
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline_s
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == 130
        resume = "the same command continues, where --run_name or --ckpt_path last names the run"
        words = "Ctrl-C: the current step is finished and saved; press it again to end at once"
        assert err == f"\n{words}\ninterrupted; {resume}\n"
        assert out.endswith("\n")  # of the bar: what follows on a terminal begins a line
        for checkpoint in folder.iterdir():
            assert torch.load(checkpoint, weights_only=True)["datamask_pl"]["version"] == 1
        assert len(parts(run_folder())) < 3
        fit(*args, "--ckpt_path", "last")
        assert_same_mask(run_folder(), workplace / "undisturbed", num_parts=3)
