"""Token budgets, quotas and forced samples from the command line to the files."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.cli import main
from datamask_pl.errors import DatamaskWarning
from tests.support.fits import (
    ESTIMATORS,
    ROLLOUTS,
    assert_same_mask,
    fit,
    manifest,
    parts,
    run,
    run_folder,
    write_shards,
)
from tests.support.ranks import on
from tests.support.shards import make_table, write

SIZES = [50, 70]
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(1, 200, size=size) for size in SIZES]
SOURCES = [np.array(["web", "code", "web", "wiki"])[RNG.integers(0, 4, size=size)] for size in SIZES]
COST = ("--data.cost_column", "tokens")
GROUP = ("--data.group_column", "source")


@pytest.fixture
def shards(workplace):
    first_id = 0
    for index, size in enumerate(SIZES):
        columns = {"tokens": pa.array(TOKENS[index]), "source": pa.array(SOURCES[index]).dictionary_encode()}
        write(workplace / f"data/shard-{index}.parquet", make_table(size, first_id=first_id, dim=8, **columns))
        first_id += size
    return str(workplace / "data")


def fit_limited(shards, *args, estimator="multilinear"):
    fit("--data.path", shards, "--data.block_size", "60", "--model.select_ratio", "0.2", *ESTIMATORS[estimator], *args)


def selected(table, column):
    return table[column].filter(table["selected"])


@pytest.mark.parametrize("estimator", ESTIMATORS)
class TestFit:
    def test_a_token_budget_is_used_up_and_never_exceeded(self, shards, estimator, capsys):
        fit_limited(shards, *COST, estimator=estimator)
        for table, block in zip(parts(run_folder()), manifest(run_folder())["blocks"].values(), strict=True):
            cost_N, kept_N = table["cost"].to_numpy(), np.asarray(table["selected"])
            limit = 0.2 * cost_N.sum()
            assert table["cost"].type == pa.float64()
            assert 0.9 * limit < cost_N[kept_N].sum() <= limit + 1e-9
            (budget,) = block["budgets"]
            assert budget["kept_cost"] == cost_N[kept_N].sum()
            assert budget["budget"] == pytest.approx(limit)
            assert block["num_selected"] == kept_N.sum()
        assert np.array_equal(
            np.concatenate([t["cost"].to_numpy() for t in parts(run_folder())]), np.concatenate(TOKENS)
        )
        assert re.search(r"all +\d+ +120 ", capsys.readouterr().out)

    def test_every_group_has_its_quota(self, shards, estimator):
        fit_limited(shards, *GROUP, "--model.group_budget", "{code: 0.5, wiki: 0}", estimator=estimator)
        for table in parts(run_folder()):
            whole, kept = table["group"].to_pylist(), selected(table, "group").to_pylist()
            exact = {"code": 0.5 * whole.count("code"), "web": 0.2 * whole.count("web"), "wiki": 0.0}
            assert len(kept) == int(sum(exact.values()) + 0.5)
            assert all(abs(kept.count(name) - share) < 1 for name, share in exact.items())

    def test_forced_ids_are_in_and_out_and_count(self, shards, estimator, workplace):
        (workplace / "keep.txt").write_text("3\n77\n\n5\n")
        pq.write_table(pa.table({"chunk_id": [4, 78, 100]}), workplace / "drop.parquet")
        forced = ("--data.keep_ids", "keep.txt", "--data.drop_ids", "drop.parquet")
        fit_limited(shards, *forced, estimator=estimator)
        tables = parts(run_folder())
        kept = [identifier for table in tables for identifier in selected(table, "id").to_pylist()]
        assert {3, 5, 77} <= set(kept)
        assert not {4, 78, 100} & set(kept)
        assert [int(np.sum(table["selected"])) for table in tables] == [12, 12]
        probability = dict(zip(tables[0]["id"].to_pylist(), tables[0]["probability"].to_pylist(), strict=True))
        assert (probability[3], probability[4]) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["multilinear", "leave_one_out"])
def test_two_ranks_give_the_mask_of_one(shards, workplace, estimator):
    (workplace / "keep.txt").write_text("3\n77\n")
    options = (
        "--data.path", shards, "--data.block_size", "60", "--model.select_ratio", "0.2", *ESTIMATORS[estimator],
        *COST, *GROUP, "--data.keep_ids", "keep.txt",
    )  # fmt: skip
    for num_ranks in (1, 2):
        code, _, err = run(*options, "--mask.output", f"mask-{num_ranks}", *on(num_ranks), folder=workplace)
        assert code == 0, err
    assert_same_mask(workplace / "mask-1", workplace / "mask-2", num_parts=2)


def test_groups_and_costs_together_give_every_group_a_token_budget(shards):
    fit_limited(shards, *COST, *GROUP)
    for table, block in zip(parts(run_folder()), manifest(run_folder())["blocks"].values(), strict=True):
        for budget in block["budgets"]:
            is_of_group = np.array(table["group"].to_pylist()) == budget["name"]
            cost_N = table["cost"].to_numpy()[is_of_group]
            assert budget["budget"] == pytest.approx(0.2 * cost_N.sum())
            assert cost_N[np.asarray(table["selected"])[is_of_group]].sum() == budget["kept_cost"] <= budget["budget"]


def test_free_groups_are_counted_and_not_limited(shards):
    fit_limited(shards, *GROUP, "--model.group_budget", "free")
    for table, block in zip(parts(run_folder()), manifest(run_folder())["blocks"].values(), strict=True):
        kept = selected(table, "group").to_pylist()
        assert len(kept) == 12
        assert {group["name"]: group["num_selected"] for group in block["budgets"]} == {
            name: kept.count(name) for name in ("code", "web", "wiki")
        }
        assert all(group["budget"] is None for group in block["budgets"])


def test_a_run_is_not_continued_with_other_limits(shards, workplace, capsys):
    (workplace / "keep.txt").write_text("3\n")
    fit_limited(shards, "--data.keep_ids", "keep.txt", "--run_name", "one")
    fit_limited(shards, "--data.keep_ids", "keep.txt", "--run_name", "one")
    assert "nothing was left to do" in capsys.readouterr().out
    (workplace / "keep.txt").write_text("4\n")
    for changed in (("--data.keep_ids", "keep.txt"), (), COST):
        with pytest.raises(SystemExit):
            fit_limited(shards, *changed, "--run_name", "one")
        assert "holds the mask of other data" in capsys.readouterr().err


def test_rows_without_cost_or_group_are_bad_rows(workplace, capsys):
    columns = {"tokens": pa.array([1.0, None, -1.0, float("nan"), *[2.0] * 16])}
    columns["source"] = pa.array(["a"] * 18 + [None, "b"])
    shards = write_shards(workplace / "data", [20], **columns)
    with pytest.raises(SystemExit):
        fit_limited(shards, *COST, *GROUP)
    assert "row 1: cost column 'tokens' must not be null" in capsys.readouterr().err
    with pytest.warns(DatamaskWarning, match="dropped 4 of 20 rows"):
        fit_limited(shards, *COST, *GROUP, "--data.on_bad_row", "drop")
    (table,) = parts(run_folder())
    assert table["source_row"].to_pylist() == [0, *range(4, 18), 19]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data.cost_column", "source"), "cost column 'source' must be a float, integer or decimal column"),
        (("--data.group_column", "feature_arr"), "group column 'feature_arr' must be a string or integer column"),
        (("--data.cost_column", "token"), "has no column 'token'; its columns are"),
        (("--model.group_budget", "{code: 0.5}"), "name the column that holds them in data.group_column"),
        ((*GROUP, "--model.group_budget", "{cod: 0.5}"), "names cod; the groups of the data are: code, web, wiki"),
        ((*GROUP, "--model.group_budget", "equal"), "group_budget"),
        (("--data.keep_ids", "none.txt"), "nothing matches 'none.txt'; pass a text file with an id a line, a parquet"),
        (("--data.keep_ids", "words.txt"), "words.txt has lines that are not ids of type int64"),
        (("--data.drop_ids", "text.parquet"), "column 'chunk_id' is string in text.parquet and int64 in the data"),
        (("--data.keep_ids", "many.txt"), "block 0: keep_ids keep 13 of 60 (samples), more than the budget of 12"),
        (("--data.keep_ids", "many.txt", "--data.drop_ids", "few.txt"), "share 1 ids, such as 3"),
        ((*COST, "--data.cost_column", "huge"), "the cheapest sample costs 5"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(shards, workplace, capsys, options, words):
    (workplace / "words.txt").write_text("one\n")
    (workplace / "many.txt").write_text("\n".join(map(str, range(13))))
    (workplace / "few.txt").write_text("3\r\n")
    write(workplace / "text.parquet", pa.table({"chunk_id": ["3"]}))
    for path in sorted((workplace / "data").iterdir()):
        table = pq.read_table(path)
        pq.write_table(table.append_column("huge", pa.array([5.0] * len(table))), path)
    options = [*options, *(["--model.select_ratio", "0.001"] if "huge" in options else [])]
    with pytest.raises(SystemExit) as caught:
        fit_limited(shards, *options)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert not (workplace / "runs").exists()


def test_ids_that_are_in_no_row_are_told_of(shards, workplace):
    (workplace / "keep.txt").write_text("3\n1000\n")
    words = "data.keep_ids and data.drop_ids: 1 of 2 ids match no sample and are ignored, the first is 1000"
    with pytest.warns(DatamaskWarning, match=words):
        fit_limited(shards, "--data.keep_ids", "keep.txt")


def test_an_id_that_many_rows_have_hides_none_that_is_in_no_row(workplace):
    for index, ids in enumerate(([3, *range(100, 109)], [3, 4, *range(200, 208)])):
        table = make_table(10, dim=8)
        column = table.schema.get_field_index("chunk_id")
        write(workplace / f"data/{index}.parquet", table.set_column(column, "chunk_id", pa.array(ids)))
    (workplace / "keep.txt").write_text("3\n")
    (workplace / "drop.txt").write_text("4\n1000\n")
    options = ("--data.keep_ids", "keep.txt", "--data.drop_ids", "drop.txt", "--data.block_size", "10")
    with pytest.warns(DatamaskWarning, match="1 of 3 ids match no sample and are ignored, the first is 1000"):
        fit_limited(str(workplace / "data"), *options)


def test_integers_are_groups_and_decimals_costs(workplace):
    columns = {"source": pa.array([7, 8] * 10), "tokens": pa.array([1] * 20).cast(pa.decimal128(38, 2))}
    shards = write_shards(workplace / "data", [20], **columns)
    fit_limited(shards, *GROUP, *COST)
    (table,) = parts(run_folder())
    assert sorted(selected(table, "group").to_pylist()) == ["7", "7", "8", "8"]


@pytest.mark.filterwarnings("ignore:all rollouts of a step had the same reward")
def test_slices_that_a_step_draws_masks_in_need_not_meet_the_budget(workplace):
    """A step may see none of a group, or nothing but what is kept in any case."""
    shards = write_shards(workplace / "data", [40], source=pa.array(["a"] * 37 + ["b"] * 3))
    (workplace / "keep.txt").write_text("0\n1\n2\n39\n")
    fit_limited(
        shards, *GROUP, "--data.keep_ids", "keep.txt", "--model.group_budget", "{b: 0.4}", *ROLLOUTS,
        "--data.partial", "0.1", estimator="leave_one_out",
    )  # fmt: skip
    (table,) = parts(run_folder())
    assert selected(table, "group").to_pylist().count("b") == 1
    assert {0, 1, 2, 39} <= set(selected(table, "id").to_pylist())


@pytest.mark.parametrize("options", [("--data.shard", "0/2"), ("--data.check_rows", "false")])
def test_unknown_groups_are_refused_where_not_all_rows_are_checked(shards, options, capsys):
    with pytest.raises(SystemExit):
        fit_limited(shards, *GROUP, *options, "--model.group_budget", "{cod: 0.5}")
    assert "names cod; the groups of the data are: code, web, wiki" in capsys.readouterr().err


def test_a_group_that_only_another_shard_holds_may_be_named(workplace):
    sources = pa.array(["web"] * 10 + ["code"] * 10)
    write(workplace / "data/shard.parquet", make_table(20, dim=4, source=sources))
    options = ("--data.block_size", "10", "--data.shard", "0/2", "--model.group_budget", "{code: 0.5}")
    fit("--data.path", "data", *options, *GROUP, "--model.num_steps", "2", "--mask.output", "mask")
    assert [int(np.sum(table["selected"])) for table in parts("mask")] == [1]


def test_integers_name_groups_of_integers(workplace):
    write(workplace / "data/shard.parquet", make_table(20, dim=4, source=pa.array([0] * 10 + [7] * 10)))
    fit("--data.path", "data", *GROUP, "--model.num_steps", "2", "--model.group_budget", "{0: 0.5}")
    (table,) = parts(run_folder())
    assert selected(table, "group").to_pylist() == ["0"] * 5 + ["7"]
    options = ("--group_column", "group", "--group_budget", "{7: 0.5}")
    main(["export", "--mask", str(run_folder() / "mask"), "--output", "other", *options])
    assert selected(parts("other")[0], "group").to_pylist() == ["0"] + ["7"] * 5


def test_shares_of_the_mask_that_are_passed_as_quotas_are_warned_of(shards, capsys):
    mixture = "{code: 0.6, web: 0.2, wiki: 0.2}"
    with pytest.warns(DatamaskWarning, match=r"keeps .* where model\.select_ratio \(0\.2\) would keep 20 %"):
        fit_limited(shards, *GROUP, "--model.group_budget", mixture, "--model.num_steps", "2")
    kept = sum(int(np.sum(table["selected"])) for table in parts(run_folder()))
    assert re.search(rf"^all +{kept} +120 ", capsys.readouterr().out, re.MULTILINE)


def test_patience_ends_a_block_whose_mask_does_not_change_at_all(shards):
    fit_limited(shards, "--model.patience", "2", "--model.min_churn", "0", "--model.num_steps", "500")
    assert all(block["num_steps"] < 500 for block in manifest(run_folder())["blocks"].values())


def test_parts_of_dropped_samples_alone_do_not_end_a_run(shards, workplace):
    (workplace / "drop.txt").write_text("\n".join(map(str, range(45))))
    options = ("--data.drop_ids", "drop.txt", "--data.partial", "0.05", "--model.num_steps", "5")
    fit_limited(shards, *options, estimator="leave_one_out")
    assert [int(np.sum(table["selected"])) for table in parts(run_folder())] == [12, 12]


def test_files_that_store_ids_and_features_in_several_ways_make_one_mask(workplace):
    texts = [f"document-{row}" for row in range(40)]
    for part, id_type in enumerate((pa.dictionary(pa.int8(), pa.string()), pa.large_string())):
        ids = pa.array(texts[20 * part : 20 * part + 20]).cast(id_type)
        feature_type = pa.list_(pa.float32(), 4) if part else pa.list_(pa.float32())
        table = make_table(20, first_id=20 * part, chunk_id=ids, feature_type=feature_type)
        write(workplace / f"data/shard-{part}.parquet", table)
    (workplace / "drop.txt").write_text("document-3\n")
    fit("--data.path", "data", "--data.drop_ids", "drop.txt", "--model.num_steps", "2")
    (table,) = parts(run_folder())
    assert table["id"].to_pylist() == texts
    main(["apply", "--mask", str(run_folder() / "mask"), "--source", "data", "--output", "filtered", "--join", "id"])
    kept = selected(table, "id").to_pylist()
    assert sorted(
        x for p in sorted((workplace / "filtered").glob("*.parquet")) for x in pq.read_table(p)["chunk_id"].to_pylist()
    ) == sorted(kept)
