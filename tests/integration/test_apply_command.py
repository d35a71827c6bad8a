"""From shards through `fit` to the filtered data set, also if `apply` is killed on the way."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.cli import main
from tests.support.fits import ROOT, files_below, fit, parts, run_folder, selected_ids, write_shards
from tests.support.shards import make_table, write


@pytest.fixture
def finished(workplace, capsys):
    """The folder of a finished run on shards of 150 rows, and what it printed."""
    shards = write_shards(workplace / "shards", [90, 60])
    fit("--data.path", shards, "--data.block_size", "60", "--model.select_ratio", "0.2", "--model.num_steps", "4")
    return run_folder(), capsys.readouterr().out


def ids_of(folder):
    paths = sorted(Path(folder).rglob("*.parquet"))
    return [id_ for path in paths for id_ in pq.read_table(path)["chunk_id"].to_pylist()]


def test_the_command_that_fit_names_at_its_end_keeps_the_ids_of_the_mask(finished, capsys):
    run, out = finished
    command = shlex.split(re.search(r"^next    python cli\.py (apply .*)$", out, re.MULTILINE)[1])
    main(command)
    kept = ids_of(run / "filtered")
    assert kept == sorted(id_ for ids in selected_ids(parts(run)) for id_ in ids)
    for name in ("shard-0.parquet", "shard-1.parquet"):
        source = pq.read_table(Path("shards") / name)
        flags = [id_ in set(kept) for id_ in source["chunk_id"].to_pylist()]
        assert pq.read_table(run / "filtered" / name).equals(source.filter(pa.array(flags)), check_metadata=True)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"kept    30 of 150 rows in 2 files, \S+ kB of \S+ kB, in \S+filtered", lines[0])
    assert lines[1] == "joined  by row"
    assert lines[2].startswith("next    ")
    main(command)
    assert capsys.readouterr().out.startswith("nothing was left to do\nkept    30 of 150 rows")


def test_of_rows_with_one_id_those_are_kept_that_the_mask_keeps_or_none_are_written(workplace, capsys):
    """Ids from 0 in each of two files: where the source is another file, nothing tells their rows apart."""
    for index, size in enumerate((60, 40)):
        write(workplace / f"shards/{index}.parquet", make_table(size, seed=index, copy=pa.array([index] * size)))
    fit("--data.path", "shards", "--data.block_size", "50", "--model.select_ratio", "0.3", "--model.num_steps", "4")
    mask = str(run_folder() / "mask")
    main(["apply", "--mask", mask, "--source", "shards", "--output", "kept"])
    places = [
        (int(Path(row["source_file"]).stem), row["id"])
        for table in parts(run_folder())
        for row in table.to_pylist()
        if row["selected"]
    ]
    kept = [pq.read_table(f"kept/{index}.parquet") for index in range(2)]
    assert [(row["copy"], row["chunk_id"]) for table in kept for row in table.to_pylist()] == sorted(places)
    assert len(places) == 30 > len({id_ for _, id_ in places})
    write(Path("texts/all.parquet"), pa.concat_tables([pq.read_table(f"shards/{index}.parquet") for index in range(2)]))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["apply", "--mask", mask, "--source", "texts", "--output", "other"])
    assert re.search(
        r"id \d+ occurs more than once in the mask \(40 of 100 ids are duplicates\)", capsys.readouterr().err
    )
    assert not Path("other").exists()


def test_texts_that_the_features_were_made_from_are_joined_by_id(finished):
    run, _ = finished
    order = np.random.default_rng(0).permutation(150)
    write(Path("texts/all.parquet"), pa.table({"chunk_id": order, "text": [f"text {row}" for row in order]}))
    main(["apply", "--mask", str(run / "mask"), "--source", "texts", "--output", "kept", "--complement", "rest"])
    wanted = {id_ for ids in selected_ids(parts(run)) for id_ in ids}
    assert ids_of("kept") == [id_ for id_ in order.tolist() if id_ in wanted]
    assert ids_of("rest") == [id_ for id_ in order.tolist() if id_ not in wanted]
    assert pq.read_table("kept/all.parquet")["text"].to_pylist() == [f"text {row}" for row in ids_of("kept")]


def test_a_fault_is_one_line_and_nothing_is_written(finished, capsys):
    run, _ = finished
    (run / "mask" / "part-00001.parquet").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["apply", "--mask", str(run / "mask"), "--source", "shards", "--output", "kept"])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith(
        f"error: {run}/mask has 2 of 3 parts, the first that is missing is part-00001.parquet; finish"
    )
    assert not Path("kept").exists()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_an_apply_that_is_killed_is_finished_by_the_next(workplace, how):
    write_shards(workplace / "shards", [40] * 30, dim=8)
    fit("--data.path", "shards", "--model.num_steps", "2", "--model.select_ratio", "0.5")
    command = ["apply", "--mask", str(run_folder() / "mask"), "--source", "shards", "--num_workers", "1", "--output"]
    main([*command, "whole"])
    # a slow disk, so that there is a middle to be killed in
    code = (
        "import sys, time; from datamask_pl.mask import filter as rewrite; from datamask_pl.cli import main;"
        "keep = rewrite._keep_rows; rewrite._keep_rows = lambda *args: (time.sleep(0.1), keep(*args))[1];"
        "main(sys.argv[1:])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command, "out"], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 300
        while len(list(Path("out").glob("*.parquet"))) < 3 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.Signals[how])
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    if how == "SIGINT":
        assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted; the same command continues")
    written = sorted(Path("out").glob("*.parquet"))
    assert 3 <= len(written) < 30
    for path in written:
        assert path.read_bytes() == (Path("whole") / path.name).read_bytes()
    main([*command, "out"])
    names = [name for name in files_below("out") if not name.endswith(".tmp")]
    assert names == files_below("whole")
    assert ids_of("out") == ids_of("whole")
