"""What we did not write, according to a record of ours, is never replaced."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.cli import main
from datamask_pl.commands.embed import embed
from datamask_pl.commands.sample import sample
from datamask_pl.errors import ConfigError
from datamask_pl.io.atomic import check_replaceable
from tests.support.fits import fit, write_shards

TRAINING = ("--data.path", "data", "--model.num_steps", "2", "--run_name", "one")


@pytest.fixture
def data(workplace):
    return write_shards(workplace / "data", [30])


def foreign(path, content=None):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        pq.write_table(pa.table({"text": ["mine"]}), path)
    else:
        path.write_bytes(content)
    return path


def refused(capsys, path, call):
    before = path.read_bytes()
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 2
    assert path.read_bytes() == before
    err = capsys.readouterr().err
    assert path.name in err
    assert "never replaced" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"not parquet"])
def test_fit_and_export_replace_no_shard_of_a_user(data, capsys, content):
    part = foreign("mine/part-00000.parquet", content)
    refused(capsys, part, lambda: fit(*TRAINING, "--mask.output", "mine"))
    fit(*TRAINING)
    call = ["export", "--mask", "runs/datamask/one/mask", "--output", "mine"]
    refused(capsys, part, lambda: main(call))


def test_fit_replaces_no_config_of_a_user_and_its_own_one(data, capsys):
    config = foreign("runs/datamask/one/config.yaml", b"# precious\nmodel: {num_steps: 2}\n")
    refused(capsys, config, lambda: fit(*TRAINING))
    config.unlink()
    fit(*TRAINING)
    fit(*TRAINING)
    text = config.read_text()
    (config.parent / "mask/part-00000.parquet").unlink()
    fit(*TRAINING)
    assert config.read_text() == text
    # one of a run before configs had a mark
    config.write_text(text.partition("\n")[2])
    (config.parent / "mask/part-00000.parquet").unlink()
    fit(*TRAINING)
    assert config.read_text() == text


def test_report_and_compare_replace_their_own_files_alone(data, capsys):
    fit(*TRAINING)
    run = ["--run", "runs/datamask/one"]
    page = foreign("mine.html", b"<html>mine</html>")
    refused(capsys, page, lambda: main(["report", *run, "--output", str(page)]))
    table = foreign("runs/datamask/one/comparison.csv", b"a,b\n1,2\n")
    refused(capsys, table, lambda: main(["compare", *run]))
    table.unlink()
    for _ in range(2):
        main(["compare", *run, "--baselines", "[random]"])


def test_sample_and_embed_replace_their_own_files_alone(workplace):
    text = foreign("text.parquet")
    with pytest.raises(ConfigError, match=r"text\.parquet exists and was not written by this command"):
        sample(str(text))
    text.unlink()
    for _ in range(2):
        sample(str(text), num_samples=40)
    features = foreign("features.parquet")
    with pytest.raises(ConfigError, match=r"features\.parquet exists and was not written by this command"):
        embed(str(text), str(features))
    features.unlink()
    for _ in range(2):
        embed(str(text), str(features), num_dimensions=4)


def test_an_empty_file_holds_nothing_to_lose(tmp_path):
    (tmp_path / "a").touch()
    check_replaceable("output", tmp_path / "a", lambda path: False)
