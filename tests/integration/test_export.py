"""Another mask from the logits of a finished one."""

import json
import shlex
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.cli import main
from tests.support.fits import assert_same_mask, files_below, fit, manifest, parts, run_folder
from tests.support.shards import make_table, write

SIZES = [50, 70]
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(1, 200, size=size) for size in SIZES]
SOURCES = [np.array(["web", "code", "web", "wiki"])[RNG.integers(0, 4, size=size)] for size in SIZES]


@pytest.fixture
def mask(workplace):
    """A finished mask without costs or groups, of two blocks."""
    first_id = 0
    for index, size in enumerate(SIZES):
        columns = {"tokens": pa.array(TOKENS[index]), "source": pa.array(SOURCES[index])}
        write(workplace / f"data/shard-{index}.parquet", make_table(size, first_id=first_id, dim=8, **columns))
        first_id += size
    fit("--data.path", "data", "--data.block_size", "60", "--model.num_steps", "5", "--model.polish", "false")
    return str(run_folder() / "mask")


def export(mask, *args, output="other"):
    main(["export", "--mask", mask, "--output", output, *args])
    return parts(output)


def test_fit_export_apply(mask, workplace, capsys):
    tables = export(mask, "--select_ratio", "0.3")
    assert [int(np.sum(table["selected"])) for table in tables] == [18, 18]
    assert "kept 36 of 120 samples in 2 blocks" in capsys.readouterr().out
    main(["apply", "--mask", "other", "--source", "data", "--output", "filtered"])
    kept = pq.read_table(workplace / "filtered")["chunk_id"].to_pylist()
    assert kept == [i for table in tables for i in table["id"].filter(table["selected"]).to_pylist()]


def test_the_same_budget_gives_the_unpolished_mask_again(mask):
    for table, before in zip(export(mask), parts(mask), strict=True):
        for name in ("id", "source_file", "source_row", "selected", "logit", "quality"):
            assert table[name].equals(before[name])
        assert np.allclose(table["probability"].to_numpy(), before["probability"].to_numpy(), atol=1e-6)


def test_the_highest_logits_are_kept(mask):
    for table in export(mask, "--select_ratio", "0.25"):
        logit_N, kept_N = table["logit"].to_numpy(), np.asarray(table["selected"])
        assert logit_N[kept_N].min() >= logit_N[~kept_N].max()


def test_costs_and_groups_of_the_source_are_joined_by_id(mask, workplace):
    # in another order, in one file, with rows that the mask does not know
    whole = pa.concat_tables([pq.read_table(path) for path in sorted((workplace / "data").iterdir())])
    more = pa.concat_tables([whole.take(pa.array(np.random.default_rng(1).permutation(120))), make_more()])
    write(workplace / "tokens.parquet", more.drop_columns(["feature_arr"]))
    limits = ("--cost_column", "tokens", "--group_column", "source", "--group_budget", "{code: 0.6}")
    tables = export(mask, *limits, "--source", "tokens.parquet", "--select_ratio", "0.2")
    tokens, sources = np.concatenate(TOKENS), np.concatenate(SOURCES)
    for index, table in enumerate(tables):
        rows = slice(60 * index, 60 * (index + 1))
        cost_N, kept_N = table["cost"].to_numpy(), np.asarray(table["selected"])
        assert cost_N.tolist() == tokens[rows].tolist()
        assert table["group"].to_pylist() == sources[rows].tolist()
        for name, ratio in {"code": 0.6, "web": 0.2, "wiki": 0.2}.items():
            is_of_group_N = sources[rows] == name
            left = ratio * cost_N[is_of_group_N].sum() - cost_N[is_of_group_N & kept_N].sum()
            assert left >= -1e-9
            assert (cost_N[is_of_group_N & ~kept_N] > left).all()
    again = export("other", "--group_column", "null", "--select_ratio", "0.1", output="third")
    assert all(
        (t["cost"].to_numpy() * np.asarray(t["selected"])).sum() <= 0.1 * t["cost"].to_numpy().sum() for t in again
    )


def make_more():
    return make_table(5, first_id=1000, dim=8, tokens=pa.array([1] * 5), source=pa.array(["web"] * 5))


def test_forced_ids_are_in_and_out(mask, workplace):
    (workplace / "keep.txt").write_text("3\n77\n")
    (workplace / "drop.txt").write_text("5\n")
    tables = export(mask, "--keep_ids", "keep.txt", "--drop_ids", "drop.txt")
    kept = [i for table in tables for i in table["id"].filter(table["selected"]).to_pylist()]
    assert {3, 77} <= set(kept)
    assert 5 not in kept
    assert len(kept) == 12


def test_forced_ids_that_the_mask_does_not_have_are_counted(mask, workplace, capsys):
    (workplace / "keep.txt").write_text("3\n7700\n")
    export(mask, "--keep_ids", "keep.txt")
    assert "keep_ids and drop_ids: 1 of 2 ids match no sample and are ignored, the first is 7700." in (
        capsys.readouterr().out
    )


def test_it_goes_on_where_it_was_killed_and_refuses_another_mask(mask, workplace, capsys):
    export(mask)
    shutil.copytree("other", "whole")
    (workplace / "other/part-00001.parquet").unlink()
    (workplace / "other/_manifest.json").unlink()
    before = (workplace / "other/part-00000.parquet").stat().st_mtime_ns
    export(mask)
    assert (workplace / "other/part-00000.parquet").stat().st_mtime_ns == before
    assert_same_mask("other", "whole", num_parts=2)
    for changed in (("--select_ratio", "0.2"), ()):
        if not changed:
            fit("--data.path", "data", "--data.block_size", "60", "--model.num_steps", "3", "--run_name", "new")
            mask = "runs/datamask/new/mask"
        with pytest.raises(SystemExit):
            export(mask, *changed)
        err = capsys.readouterr().err
        assert "export.select_ratio is 0.1 there and 0.2 here" in err if changed else "other logits" in err


def test_a_damaged_part_of_its_own_is_made_again_which_is_said(mask, workplace):
    export(mask)
    shutil.copytree("other", "whole")
    (workplace / "other/part-00001.parquet").write_bytes(b"PAR1")
    with pytest.warns(UserWarning, match=r"part-00001\.parquet is damaged .*; it is made again from the logits"):
        export(mask)
    assert_same_mask("other", "whole", num_parts=2)


def test_the_manifest_says_what_it_was_made_from_and_what_is_kept(mask):
    export(mask, "--select_ratio", "0.2")
    content = manifest("other")
    assert content["settings"]["export.select_ratio"] == 0.2
    assert content["plan_hash"] == manifest(mask)["plan_hash"]
    assert content["blocks"]["0"]["made_from"]["mask"] == mask
    assert content["blocks"]["0"]["num_selected"] == content["blocks"]["0"]["budgets"][0]["num_selected"] == 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mask", "nowhere"), "nowhere is not a mask folder"),
        (("--select_ratio", "1.5"), "select_ratio must be above 0 and at most 1"),
        (("--select_ratio", "0.001"), "block 0: select_ratio keeps 0 of 60 samples"),
        (("--cost_column", "tokens"), "has no column 'tokens'; its columns are: id, source_file"),
        (("--cost_column", "logit"), "block 0, row"),
        (("--cost_column", "token", "--source", "data"), "shard-0.parquet has no column 'token'"),
        (("--group_column", "source", "--source", "data/shard-0.parquet"), "source does not have id 50 of the mask"),
        (("--group_budget", "{code: 1.0}"), "name the column that holds them in group_column"),
        (("--group_column", "source", "--source", "data", "--group_budget", "{cod: 1.0}"), "group_budget names cod"),
        (("--source", "data"), "source is for its columns"),
        (("--keep_ids", "none.txt"), "keep_ids: nothing matches"),
        (("--output", "data"), "output data holds other things"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(mask, workplace, capsys, options, words):
    before = files_below(workplace)
    with pytest.raises(SystemExit) as caught:
        export(mask, *options)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert files_below(workplace) == before
    assert json.loads((run_folder() / "mask/_manifest.json").read_text())["num_blocks"] == 2


class TestLimitsOfTheRun:
    @pytest.fixture
    def limited(self, workplace):
        """A mask within a token budget, a quota and forced ids, of files with an id column of its own."""
        table = make_table(60, dim=8, tokens=pa.array(TOKENS[1][:60]), source=pa.array(SOURCES[1][:60]))
        write(workplace / "data/shard.parquet", table.rename_columns(["doc", *table.column_names[1:]]))
        (workplace / "keep.txt").write_text("3\n7\n")
        pq.write_table(pa.table({"doc": [5, 9]}), workplace / "drop.parquet")
        fit(
            *(
                "--data.path",
                "data",
                "--data.id_column",
                "doc",
                "--data.keep_ids",
                "keep.txt",
                "--model.num_steps",
                "2",
            ),
            *("--data.drop_ids", "drop.parquet", "--data.cost_column", "tokens", "--data.group_column", "source"),
            *("--model.group_budget", "{code: 0.5}", "--model.select_ratio", "0.3", "--model.num_steps", "2"),
        )
        return str(run_folder() / "mask")

    def test_are_those_of_an_export(self, limited, capsys):
        (table,) = export(limited)
        out = capsys.readouterr().out
        assert manifest("other")["blocks"]["0"]["budgets"] != []
        for budget, before in zip(
            manifest("other")["blocks"]["0"]["budgets"], manifest(limited)["blocks"]["0"]["budgets"], strict=True
        ):
            assert (budget["name"], budget["budget"]) == (before["name"], before["budget"])
        kept = table["id"].filter(table["selected"]).to_pylist()
        assert {3, 7} <= set(kept)
        assert not {5, 9} & set(kept)
        for words in ("cost_column cost", "group_column group", "keep_ids keep.txt", "drop_ids drop.parquet"):
            assert words in out

    def test_are_left_out_by_null_also_in_the_next_export(self, limited, capsys):
        export(limited, "--keep_ids", "null", "--drop_ids", "null", "--select_ratio", "0.9")
        out = capsys.readouterr().out
        assert "keep_ids" not in out
        assert "cost_column cost" in out
        export("other", "--cost_column", "null", "--group_column", "null", output="third")
        assert "taken over: select_ratio 0.9\n" in capsys.readouterr().out
        assert manifest("third")["blocks"]["0"]["num_selected"] == 54

    def test_stay_where_another_column_is_joined(self, limited):
        pq.write_table(pa.table({"doc": list(range(60)), "length": [1.0] * 60}), "lengths.parquet")
        (table,) = export(limited, "--cost_column", "length", "--source", "lengths.parquet")
        kept = table["id"].filter(table["selected"]).to_pylist()
        assert {3, 7} <= set(kept)
        assert set(table["cost"].to_pylist()) == {1.0}
        assert [budget["name"] for budget in manifest("other")["blocks"]["0"]["budgets"]] == ["code", "web", "wiki"]

    def test_the_printed_command_makes_the_filtered_data(self, limited, capsys):
        export(limited)
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next"))
        words = shlex.split(line)
        main(words[words.index("apply") :])
        assert pq.read_table("other-filtered").num_rows == manifest("other")["blocks"]["0"]["num_selected"]
