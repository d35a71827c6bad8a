"""The table of `compare` says what the masks are worth, or why it cannot be made."""

import csv
import io
import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from datamask_pl.cli import main
from datamask_pl.commands import compare as module
from datamask_pl.data.scaling import scale_quality
from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.evidence import comparison
from datamask_pl.evidence.baselines.catalog import BASELINES
from datamask_pl.evidence.comparison import COMPARISON_CSV, COMPARISON_JSON
from datamask_pl.evidence.run import FinishedRun
from datamask_pl.functional.seeding import derive_seed
from tests.support import oracles
from tests.support.fits import ESTIMATORS, fit, manifest, parts, run_folder
from tests.support.shards import make_table, write

OPTIONS = ("--data.block_size", "60", "--model.select_ratio", "0.2", "--model.num_steps", "4")
STORED = {"compression": "none", "use_dictionary": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two blocks of 50 and the shards that it was made from, not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    for index in range(2):
        write(folder / f"shards/{index}.parquet", make_table(50, first_id=50 * index), **STORED)
    fit("--data.path", "shards", *OPTIONS, folder=folder)
    return folder


def compare(*args):
    main(["compare", *map(str, args)])


def table(folder):
    with open(folder / COMPARISON_CSV, newline="") as file:
        return {(int(row["block"]), row["name"]): row for row in csv.DictReader(file)}


def block_of(index):
    """Features and scaled quality of a block, read without the package's reader."""
    return block_of_shard(f"shards/{index}.parquet")


def block_of_shard(path):
    shard = pq.read_table(path)
    features_ND = np.stack([np.array(row) for row in shard["feature_arr"].to_pylist()])
    quality_N = scale_quality(shard["quality_score"].to_numpy(), "rank").astype(float)
    return features_ND / np.linalg.norm(features_ND, axis=1, keepdims=True), quality_N


class TestTheTable:
    def test_of_every_block_asked_for_it_has_the_mask_and_every_baseline(self, run, capsys):
        compare("--run", run, "--blocks", "[1, 0]")
        names = ["mask", *comparison.DEFAULT_BASELINES]
        assert sorted(table(run)) == sorted((block, name) for block in range(2) for name in names)
        out = capsys.readouterr().out
        assert all(out.count(f"\n{name} ") == 2 for name in names)
        assert f"written {run / COMPARISON_CSV}" in out
        content = json.loads((run / COMPARISON_JSON).read_text())
        assert [block["index"] for block in content["blocks"]] == [0, 1]
        for row in content["blocks"][1]["rows"]:
            assert {name: str(value) for name, value in row.items()} == table(run)[1, row["name"]]

    def test_the_masks_own_numbers_are_those_of_the_manifest(self, run):
        compare("--run", run)
        row, about = table(run)[0, "mask"], manifest(run)["blocks"]["0"]
        assert float(row["f"]) == pytest.approx(about["mask"]["f"], rel=1e-6)
        assert float(row["quality"]) == pytest.approx(about["mask"]["terms"]["quality"], abs=1e-6)
        assert float(row["facility_location"]) == pytest.approx(about["mask"]["terms"]["facility_location"], abs=1e-6)
        assert float(row["seconds"]) == about["seconds"]
        assert float(row["overlap"]) == 1.0

    @pytest.mark.parametrize("seed", [0, 5])
    def test_the_random_mask_is_the_one_that_fit_drew(self, run, seed):
        compare("--run", run, "--blocks", "[0, 1]", "--seed", seed, "--baselines", "[random]")
        for index in range(2):
            row, about = table(run)[index, "random"], manifest(run)["blocks"][str(index)]
            assert float(row["f"]) == pytest.approx(about["random"]["f"], rel=1e-6)
            for name, value in about["random"]["terms"].items():
                assert float(row[name]) == pytest.approx(value, abs=1e-6)

    def test_what_a_first_call_costs_is_in_no_methods_seconds(self, run, monkeypatch):
        """Every method is called for a few samples, then for all, between two looks at the clock."""
        events = []
        clock, baseline_mask = module.time.perf_counter, module.baseline_mask

        def noting(name, features_ND, quality_N, **options):
            events.append((name, len(features_ND), options["num_selected"]))
            return baseline_mask(name, features_ND, quality_N, **options)

        monkeypatch.setattr(module, "NUM_FIRST", 20)
        monkeypatch.setattr(module, "baseline_mask", noting)
        monkeypatch.setattr(module.time, "perf_counter", lambda: events.append("clock") or clock())
        compare("--run", run, "--baselines", "[top_quality, semdedup]")
        seen = [event for event in events if event != "clock"]
        assert seen == [(name, *size) for name in ("top_quality", "semdedup") for size in [(20, 4), (50, 10)]]
        for name in ("top_quality", "semdedup"):
            whole = events.index((name, 50, 10))
            assert events[whole - 1] == events[whole + 1] == "clock"

    def test_numbers_of_a_baseline_are_the_formulas_of_its_mask(self, run):
        compare("--run", run, "--blocks", 1, "--baselines", "[top_quality]")
        row, scales = table(run)[1, "top_quality"], manifest(run)["blocks"]["1"]["scales"]
        features_ND, quality_N = block_of(1)
        mask_N = oracles.mask_of(list(np.argsort(-quality_N, kind="stable")[:10]), 50)
        expected = {
            "quality": oracles.quality_mean(mask_N, quality_N, num_selected=10),
            "facility_location": oracles.facility_location(mask_N, features_ND),
            "pairwise": oracles.pairwise(mask_N, features_ND, num_selected=10),
            "disf": oracles.disf(mask_N, features_ND, num_selected=10),
        }
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(value, abs=1e-6)
        f = sum(0.5 * expected[name] / scales[name] for name in ("quality", "facility_location"))
        assert float(row["f"]) == pytest.approx(f, rel=1e-5)
        own_N = parts(run)[1]["selected"].to_numpy()
        assert float(row["overlap"]) == pytest.approx((own_N & mask_N).sum() / (own_N | mask_N).sum())

    @pytest.mark.parametrize("calibrate", ["true", "false"])
    @pytest.mark.parametrize("kind", ["facility_location", "pairwise", "disf"])
    def test_greedy_maximises_the_runs_own_f(self, made, workplace, kind, calibrate):
        """With the run's weights and scales: no other greedy of one term gets a higher f, nor does top quality."""
        options = ("--model.diversity", kind, "--model.calibrate", calibrate, "--model.quality_weight", "0.4")
        fit("--data.path", str(made / "shards"), *OPTIONS, *options)
        greedy = [name for name in BASELINES if name.startswith("greedy_")]
        compare("--run", run_folder(), "--baselines", json.dumps(["random", "top_quality", *greedy]))
        values = {name: float(row["f"]) for (_, name), row in table(run_folder()).items() if name != "mask"}
        assert max(values, key=values.get) == f"greedy_{kind}"

    def test_every_baseline_can_be_asked_for(self, run):
        compare("--run", run, "--baselines", json.dumps(list(BASELINES)))
        assert {name for _, name in table(run)} == {"mask", *BASELINES}

    def test_it_is_the_same_twice_but_for_the_seconds(self, run):
        tables = []
        for _ in range(2):
            compare("--run", run, "--seed", 5)
            tables.append({key: {**row, "seconds": 0} for key, row in table(run).items() if key[1] != "mask"})
        assert tables[0] == tables[1]

    def test_of_a_large_block_a_random_part_is_compared_and_it_says_so(self, run, capsys):
        compare("--run", run, "--max_samples", 30)
        out = capsys.readouterr().out
        assert "30 random samples of 50 (max_samples). The mask was learned for the whole block" in out
        assert "relearned: the run's method on these samples" in out
        assert float(table(run)[0, "relearned"]["f"]) >= float(table(run)[0, "mask"]["f"])
        (block,) = json.loads((run / COMPARISON_JSON).read_text())["blocks"]
        assert block["num_samples"] == 30
        _, quality_N = block_of(0)
        own_N = parts(run)[0]["selected"].to_numpy()
        quality = float(table(run)[0, "mask"]["quality"])
        means = {quality_N[rows].mean() for rows in oracle_subsets(np.flatnonzero(own_N), block["num_selected"])}
        assert min(abs(quality - mean) for mean in means) < 1e-6
        assert float(table(run)[0, "top_quality"]["quality"]) <= quality_N[np.argsort(-quality_N)][:10].mean()

    def test_of_a_mask_with_limits_it_says_that_the_others_have_none(self, run, capsys, monkeypatch):
        monkeypatch.setattr(FinishedRun, "limits", ["data.cost_column"])
        compare("--run", run, "--max_samples", 30, "--baselines", "[random]")
        assert "the mask respects data.cost_column; the baselines ignore them" in capsys.readouterr().out
        assert {name for _, name in table(run)} == {"mask", "random"}

    def test_a_custom_objective_and_several_terms_are_valued_as_the_run_did(self, made, workplace):
        own = '{"class_path": "tests.support.objectives.EvenRows"}'
        terms = '[{"objective": "pairwise", "weight": 2}, {"objective": ' + own + "}]"
        options = (*OPTIONS[:4], *ESTIMATORS["group_relative"], "--model.diversity", terms)
        fit("--data.path", str(made / "shards"), *options)
        compare("--run", run_folder(), "--baselines", "[random]")
        about = manifest(run_folder())["blocks"]["0"]
        assert float(table(run_folder())[0, "mask"]["f"]) == pytest.approx(about["mask"]["f"], rel=1e-6)

    @pytest.mark.parametrize("estimator", ["multilinear", "leave_one_out"])
    def test_a_mask_that_was_exported_is_valued_by_the_runs_own_objective(self, made, workplace, capsys, estimator):
        options = (*OPTIONS[:4], *ESTIMATORS[estimator], "--model.polish", "false")
        fit("--data.path", str(made / "shards"), *options)
        for name, ratio in (("same", 0.2), ("more", 0.4)):
            main(["export", "--mask", str(run_folder() / "mask"), "--output", name, "--select_ratio", str(ratio)])
        about = manifest(run_folder())["blocks"]["0"]
        compare("--mask", "same", "--baselines", "[random]")
        row = table(workplace / "same-evidence")[0, "mask"]
        if estimator == "multilinear":  # the logits' own mask; where masks are drawn, the best of them may be kept
            assert float(row["f"]) == pytest.approx(about["mask"]["f"], rel=1e-6)
        assert float(row["seconds"]) == about["seconds"]
        compare("--mask", "more", "--baselines", "[top_quality]")
        rows, (features_ND, quality_N) = table(workplace / "more-evidence"), block_of_shard(made / "shards/0.parquet")
        own_N = parts("more")[0]["selected"].to_numpy()
        terms = {
            "quality": oracles.quality_mean(own_N, quality_N, num_selected=20),
            "facility_location": oracles.facility_location(own_N, features_ND),
        }
        f = sum(0.5 * value / about["scales"][name] for name, value in terms.items())
        assert float(rows[0, "mask"]["f"]) == pytest.approx(f, rel=1e-5)
        out = capsys.readouterr().out
        assert "was exported from the logits of a run" in out
        assert ((0, "relearned") in rows) == (estimator == "multilinear") == ("relearned: the run's method" in out)

    def test_what_is_learned_for_an_exported_budget_is_worth_as_much_or_more(self, run, workplace):
        main(["export", "--mask", str(run / "mask"), "--output", "more", "--select_ratio", "0.4"])
        compare("--mask", "more", "--baselines", "[random]")
        f = {name: float(row["f"]) for (_, name), row in table(workplace / "more-evidence").items()}
        assert f["relearned"] >= f["mask"] > f["random"]

    def test_limits_are_those_of_the_export_not_of_the_run(self, made, workplace, capsys):
        Path("keep.txt").write_text("3\n")
        fit("--data.path", str(made / "shards"), *OPTIONS, "--data.keep_ids", "keep.txt")
        main(["export", "--mask", str(run_folder() / "mask"), "--output", "free", "--keep_ids", "null"])
        Path("drop.txt").write_text("4\n")
        main(["export", "--mask", "free", "--output", "limited", "--drop_ids", "drop.txt"])
        capsys.readouterr()
        compare("--mask", "free", "--baselines", "[random]")
        assert "the mask respects" not in capsys.readouterr().out
        compare("--mask", "limited", "--baselines", "[random]")
        assert "the mask respects export.drop_ids; the baselines ignore them" in capsys.readouterr().out

    def test_without_a_run_the_table_goes_beside_the_mask_or_where_told(self, run, workplace):
        compare("--mask", run / "mask", "--baselines", "[random]")
        assert (run / COMPARISON_CSV).exists()
        compare("--mask", run / "mask", "--output", "there", "--baselines", "[random]")
        assert (workplace / "there" / COMPARISON_JSON).exists()
        shutil.copytree(run / "mask", "masks/mine")
        compare("--mask", "masks/mine", "--baselines", "[random]")
        assert (workplace / "masks/mine-evidence" / COMPARISON_CSV).exists()

    def test_a_mask_in_an_object_store_can_be_compared(self, run, workplace):
        store = fsspec.filesystem("memory")
        for path in (run / "mask").iterdir():
            store.pipe_file(f"/bucket/{workplace.name}/{path.name}", path.read_bytes())
        compare("--run", run, "--baselines", "[random]")
        compare("--mask", f"memory://bucket/{workplace.name}", "--baselines", "[random]")
        assert table(workplace / f"{workplace.name}-evidence")[0, "mask"] == table(run)[0, "mask"]


def first_of(num_samples, seed):
    """The sample that is compared where one is: the choice is documented by its seed alone."""
    generator = torch.Generator().manual_seed(derive_seed(seed, 0, 0))
    return int(torch.randperm(num_samples, generator=generator)[0])


def oracle_subsets(rows, size):
    from itertools import combinations

    return [list(part) for part in combinations(rows, size)]


class TestFaults:
    def fails(self, capsys, *args):
        with pytest.raises(SystemExit) as stopped:
            compare(*args)
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((), "pass either --run, the folder of a run, or --mask"),
            (("--run", "RUN", "--mask", "RUN/mask"), "pass either --run, the folder of a run, or --mask"),
            (("--run", "nowhere"), "nowhere has no mask (nowhere/mask/_manifest.json does not exist); pass the folder"),
            (("--run", "."), ". has no mask (mask/_manifest.json does not exist); if mask.output was set"),
            (("--run", "RUN/mask"), "it is a mask folder itself: --mask runs/datamask/version_0/mask"),
            (("--mask", "RUN"), "runs/datamask/version_0 is not a mask folder"),
            (("--run", "RUN", "--blocks", "7"), "2 of 2, from 0 to 1; got [7]"),
            (("--run", "RUN", "--blocks", "[]"), "blocks must be finished ones"),
            (("--run", "RUN", "--baselines", "[best]"), "baselines must be distinct names of: random, "),
            (
                ("--run", "RUN", "--baselines", "random"),
                "baselines must be a list such as [one, two], or null; got",
            ),
            (("--run", "RUN", "--max_samples", "0"), "max_samples must be at least 1, got 0"),
            (("--run", "RUN", "--near_duplicate", "1"), "near_duplicate must be a cosine above 0 and below 1, got 1"),
            (("--run", "RUN", "--seed", "-1"), "seed must be 0 <= seed < 2^63"),
            (("--run", "RUN", "--output", "shards/0.parquet"), "a part of the path is a file, not a folder"),
            (("--run", "RUN", "--source", "nowhere"), "nothing matches 'nowhere'"),
            (("--run", "RUN", "--num_workers", "3"), "python cli.py compare --help lists the options"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_what_cannot_work_is_said_in_one_line_and_nothing_is_written(self, run, capsys, args, message):
        line = self.fails(capsys, *(arg.replace("RUN", str(run)) for arg in args))
        assert message in line
        assert not list(run.parent.rglob("*comparison*"))

    def test_a_source_that_has_moved_can_be_given(self, run, capsys):
        shutil.move("shards", "moved")
        assert "if the files have moved, pass --source" in self.fails(capsys, "--run", run)
        compare("--run", run, "--source", "moved", "--baselines", "[random]")
        assert (run / COMPARISON_CSV).exists()

    def test_other_files_are_refused_by_their_hash(self, run, capsys):
        write(run / "other.parquet", make_table(30))
        line = self.fails(capsys, "--run", run, "--source", run / "other.parquet")
        assert f"source: {run}/mask was learned from other files" in line
        assert manifest(run)["plan_hash"][:12] in line
        assert "shards/0.parquet, shards/1.parquet" in line

    def test_other_ids_in_files_of_the_same_size_are_noticed(self, run, capsys):
        shard = pq.read_table("shards/0.parquet")
        ids = shard["chunk_id"].to_pylist()
        swapped = pa.array([*ids[:2], ids[3], ids[2], *ids[4:]])
        write(run.parents[2] / "shards/0.parquet", shard.set_column(0, "chunk_id", swapped), **STORED)
        line = self.fails(capsys, "--run", run)
        assert "the files no longer hold the samples of the mask; they differ from sample 2" in line

    def test_other_features_in_files_of_the_same_size_are_said(self, run, capsys):
        write(run.parents[2] / "shards/0.parquet", make_table(50, seed=9), **STORED)
        compare("--run", run, "--baselines", "[random]")
        assert "features, qualities or the objective have changed since the run" in capsys.readouterr().out

    def test_a_run_that_was_made_from_python_is_refused(self, run, capsys):
        content = manifest(run)
        (run / "mask/_manifest.json").write_text(json.dumps({**content, "config": None}))
        assert "was made from Python" in self.fails(capsys, "--run", run)

    def test_a_configuration_of_another_version_is_refused(self, run, capsys):
        content = manifest(run)
        content["config"]["model"]["colour"] = "blue"
        (run / "mask/_manifest.json").write_text(json.dumps(content))
        line = self.fails(capsys, "--run", run)
        assert "colour" in line
        assert f"use the version of datamask_pl that made it, {content['versions']['datamask_pl']}" in line

    def test_finished_blocks_of_an_unfinished_run_can_be_compared(self, run, capsys):
        (run / "mask/part-00001.parquet").unlink()
        compare("--run", run, "--baselines", "[random]")
        assert "1 of 2, from 0 to 0; got [1]" in self.fails(capsys, "--run", run, "--blocks", "1")
        (run / "mask/part-00000.parquet").unlink()
        assert "has no finished block" in self.fails(capsys, "--run", run)

    def test_too_many_samples_for_greedys_memory_are_refused_before_the_work(self, run, monkeypatch):
        from datamask_pl.commands.compare import compare as function

        monkeypatch.setattr(comparison, "MAX_SIMILARITY_BYTES", 4 * 20**2)
        with pytest.raises(ConfigError, match="lower max_samples to 20"):
            function(run=str(run))
        function(run=str(run), max_samples=20)

    def test_a_part_of_the_block_that_keeps_nothing_is_refused(self, run):
        from datamask_pl.commands.compare import compare as function

        seed = next(seed for seed in range(99) if not parts(run)[0]["selected"][first_of(50, seed)].as_py())
        with pytest.raises(ConfigError, match="the mask keeps none of 1 random samples of block 0; raise it"):
            function(run=str(run), max_samples=1, seed=seed)

    @pytest.mark.parametrize("command", ["compare", "report"])
    def test_a_part_that_is_damaged_or_of_another_run_is_named(self, run, capsys, command):
        if command == "report":
            pytest.importorskip("matplotlib")
        part = run / "mask/part-00000.parquet"
        whole, other = pq.read_table(part), (run / "mask/part-00001.parquet").read_bytes()
        cases = [
            (part.read_bytes()[:-9], "part-00000.parquet is damaged ("),
            (other, "under another name); the command"),
        ]
        about = json.loads(whole.schema.metadata[b"datamask_pl"])
        flags = pa.array([not flag for flag in whole["selected"].to_pylist()])
        flipped = io.BytesIO()
        pq.write_table(whole.set_column(3, "selected", flags), flipped)
        num_selected = about["about"]["num_selected"]
        cases.append((flipped.getvalue(), f"{50 - num_selected} samples are selected instead of {num_selected}"))
        for content, words in cases:
            part.write_bytes(content)
            with pytest.raises(SystemExit) as stopped:
                main([command, "--run", str(run)])
            assert stopped.value.code == 2
            assert words in capsys.readouterr().err
            assert not list(run.glob("[cr]*[nt].*"))

    def test_a_part_that_does_not_say_what_f_is_is_refused(self, run):
        from datamask_pl.commands.compare import compare as function

        part = run / "mask/part-00000.parquet"
        whole = pq.read_table(part)
        content = json.loads(whole.schema.metadata[b"datamask_pl"])
        content["about"]["scales"] = {"quality": 1.0}
        pq.write_table(whole.replace_schema_metadata({b"datamask_pl": json.dumps(content)}), part)
        with pytest.raises(DataFileError, match="has no scales of the terms of f"):
            function(run=str(run))

    def test_a_damaged_manifest_is_named(self, run):
        from datamask_pl.commands.compare import compare as function

        (run / "mask/_manifest.json").write_text("{")
        with pytest.raises(DataFileError, match="cannot be read as a mask manifest"):
            function(run=str(run))
