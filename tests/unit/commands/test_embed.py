"""Texts become unit vectors: every row, in order, with its other columns, or an error that says where."""

import itertools
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.commands import embed as module
from datamask_pl.commands.embed import embed, lsa
from datamask_pl.commands.sample import Sample, distinct_samples, read_docstrings, stdlib_folder
from datamask_pl.errors import BadRowError, ConfigError, DataFileError, SchemaError

TOPICS = [["red", "car", "road"], ["tall", "tree", "leaf"], ["salt", "soup", "spoon"], ["blue", "sea", "ship"]]


def _texts(num_texts, seed=0):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(TOPICS[row % 4], 5)) + " everywhere" for row in range(num_texts)]


def _write(path, texts, **columns):
    ids = pa.array([f"{path.stem}-{row}" for row in range(len(texts))], pa.string())
    pq.write_table(pa.table({"chunk_id": ids, "text": texts, **columns}), path)
    return str(path)


def _vectors(path, column="feature_arr"):
    array = pq.read_table(path)[column]
    return np.concatenate([chunk.flatten().to_numpy() for chunk in array.chunks]).reshape(len(array), -1)


@pytest.fixture
def source(tmp_path):
    return _write(tmp_path / "text.parquet", _texts(40))


def test_vectors_are_unit_float16_and_like_texts_are_near(source, tmp_path, capsys):
    output = tmp_path / "new" / "features.parquet"
    embed(source, str(output), num_dimensions=6)
    table = pq.read_table(output)
    assert table.schema.field("feature_arr").type == pa.list_(pa.float16(), 6)
    assert table.schema.names == ["chunk_id", "feature_arr"]
    features = _vectors(output).astype(np.float32)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, atol=2e-3)
    similarity = features @ features.T
    is_same = np.equal.outer(np.arange(40) % 4, np.arange(40) % 4)
    assert similarity[is_same].mean() > 0.6 > 0.2 > similarity[~is_same].mean()
    line = capsys.readouterr().out
    assert re.fullmatch(
        rf"Embedded 40 texts in 6 dimensions \(\d+\.\d% of their variance\) to {re.escape(str(output))}\. "
        rf"Next: python cli\.py fit --data\.path {re.escape(str(output))}\n",
        line,
    )


def test_the_decomposition_is_that_of_a_dense_one():
    """Oracle: TF-IDF by its formula and numpy's full SVD; similarities do not depend on the signs of the directions."""
    texts = ["ab cd ab", "cd ef", "ab ef ef ef", "gh cd", "gh gh ab", "ef"]
    words = [re.findall("[a-h]{2}", text) for text in texts]
    grams = [found + [" ".join(pair) for pair in itertools.pairwise(found)] for found in words]
    vocabulary = sorted({gram for found in grams for gram in found})
    counts = np.array([[found.count(gram) for gram in vocabulary] for found in grams], float)
    num_with = (counts > 0).sum(axis=0)
    weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * (1 + np.log(7 / (1 + num_with)))
    weights = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    _, _, directions = np.linalg.svd(weights, full_matrices=False)
    projected = weights @ directions[:3].T
    expected = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    features, share = lsa(texts, num_dimensions=3, min_df=1, seed=0)
    np.testing.assert_allclose(features @ features.T, expected @ expected.T, atol=1e-5)
    assert share == pytest.approx(projected.var(axis=0).sum() / weights.var(axis=0).sum(), rel=1e-4)


def test_the_same_seed_gives_the_same_bytes(source, tmp_path):
    for name in ("a", "b"):
        embed(source, str(tmp_path / name), num_dimensions=4, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_other_column_keeps_its_exact_type_and_values(tmp_path):
    num_texts = 12
    stamp = datetime(2026, 1, 2, tzinfo=UTC)
    columns = {
        "big_id": pa.array([2**64 - 1 - row for row in range(num_texts)], pa.uint64()),
        "quality_score": pa.array([0.1] * num_texts, pa.float32()),
        "group": pa.array(["x", None] * 6).dictionary_encode(),
        "when": pa.array([stamp] * num_texts, pa.timestamp("us", "UTC")),
        "tags": pa.array([["a"], []] * 6, pa.list_(pa.string())),
        "large": pa.array(["z"] * num_texts, pa.large_string()),
    }
    path = _write(tmp_path / "text.parquet", _texts(num_texts), **columns)
    embed(path, str(tmp_path / "out.parquet"), num_dimensions=3)
    before = pq.read_table(path).drop_columns("text")
    after = pq.read_table(tmp_path / "out.parquet").drop_columns("feature_arr")
    assert after.schema == before.schema
    assert after.equals(before)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_any_string_type_holds_texts(tmp_path, kind):
    path = _write(tmp_path / "a.parquet", _texts(12))
    other = _write(tmp_path / "b.parquet", pa.array(_texts(12)).cast(kind))
    for name in (path, other):
        embed(name, name + ".out", num_dimensions=3)
    np.testing.assert_array_equal(_vectors(path + ".out"), _vectors(other + ".out"))


def test_several_files_are_one_corpus_in_their_order(tmp_path, source):
    texts = _texts(40)
    bounds = [0, 7, 7, 40]
    paths = [
        _write(tmp_path / f"part-{part}.parquet", pa.array(texts[start:stop], pa.string()))
        for part, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    outputs = [tmp_path / "whole", tmp_path / "glob", tmp_path / "list"]
    for given, output in zip([source, str(tmp_path / "part-*.parquet"), paths], outputs, strict=True):
        embed(given, str(output), num_dimensions=4)
    for output in outputs[1:]:
        np.testing.assert_array_equal(_vectors(output), _vectors(outputs[0]))
    ids = pq.read_table(outputs[1])["chunk_id"].to_pylist()
    assert ids == [f"part-0-{row}" for row in range(7)] + [f"part-2-{row}" for row in range(33)]


def test_files_may_differ_in_order_and_nullability_of_columns(tmp_path):
    texts = _texts(12)
    pq.write_table(pa.table({"text": texts, "n": range(12)}), tmp_path / "a.parquet")
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("text", pa.string(), nullable=False)])
    pq.write_table(pa.table({"n": range(12), "text": texts}, schema=schema), tmp_path / "b.parquet")
    embed(str(tmp_path / "*.parquet"), str(tmp_path / "out"), num_dimensions=3)
    assert pq.read_table(tmp_path / "out")["n"].to_pylist() == [*range(12), *range(12)]


def test_a_file_of_texts_alone_can_be_embedded(tmp_path):
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": _texts(8)}), tmp_path / f"{name}.parquet")
    embed(str(tmp_path / "*.parquet"), str(tmp_path / "out"), num_dimensions=3, feature_column="vector")
    assert pq.read_table(tmp_path / "out").schema.names == ["vector"]
    assert _vectors(tmp_path / "out", "vector").shape == (16, 3)


def test_rows_beyond_one_row_group_stay_in_order(tmp_path, monkeypatch):
    path = _write(tmp_path / "text.parquet", _texts(25))
    embed(path, str(tmp_path / "one"), num_dimensions=3)
    monkeypatch.setattr(module, "_ROW_GROUP_SIZE", 10)
    embed(path, str(tmp_path / "three"), num_dimensions=3)
    assert pq.ParquetFile(tmp_path / "three").num_row_groups == 3
    assert pq.read_table(tmp_path / "three").equals(pq.read_table(tmp_path / "one"))


@pytest.mark.slow
def test_neighbours_of_real_texts_are_about_the_same_thing():
    prefixes = ("json.", "datetime.", "statistics.", "threading.", "ipaddress.", "tarfile.", "zipfile.", "email.")
    found = (Sample(*row) for row in read_docstrings(stdlib_folder()) if row[0].startswith(prefixes))
    names, texts = zip(*distinct_samples(found, 40), strict=True)
    features, share = lsa(texts, num_dimensions=64, min_df=2, seed=0)
    assert np.isfinite(features).all()
    assert 0.2 < share < 0.8
    similarity = features @ features.T
    np.fill_diagonal(similarity, -1)
    nearest = {name: names[row] for name, row in zip(names, similarity.argmax(axis=1), strict=True)}
    assert nearest["json.dumps"] == "json.dump"
    assert nearest["statistics.median_low"] == "statistics.median_high"
    is_same_module = [name.split(".")[0] == other.split(".")[0] for name, other in nearest.items()]
    assert np.mean(is_same_module) > 0.8


def test_texts_that_are_all_the_same_have_one_vector():
    features, share = lsa(["one two three"] * 9, num_dimensions=1, min_df=2, seed=0)
    np.testing.assert_allclose(features, features[:1].repeat(9, axis=0), rtol=1e-5)
    assert share == 1


@pytest.mark.parametrize("text", ["", "  \n", "? !", "a b c", "unheard"])
def test_a_text_without_a_vector_is_an_error_that_says_where(tmp_path, text):
    """sentence-transformers #589: a zero vector becomes NaN under cosine, and is then always chosen."""
    first = _write(tmp_path / "a.parquet", _texts(20))
    second = _write(tmp_path / "b.parquet", [*_texts(5), text, "", *_texts(5)])
    with pytest.raises(BadRowError) as caught:
        embed([first, second], str(tmp_path / "out"), num_dimensions=3)
    assert str(caught.value) == (
        f"{second}, row 5: no vector for {text!r} (and 1 more of 32 texts): none of its terms occurs in min_df=2 "
        "texts, or none is in the num_dimensions=3 strongest directions; "
        "remove those rows, lower min_df or raise num_dimensions."
    )
    assert not (tmp_path / "out").exists()


def test_a_text_apart_from_the_strongest_directions_has_no_vector_rather_than_noise():
    features, _ = lsa([*["one two three"] * 400, "lone wolf", "lone wolf"], num_dimensions=1, min_df=2, seed=0)
    assert not features[-2:].any()
    np.testing.assert_allclose(np.abs(features[:-2]), 1)


def test_a_null_text_is_an_error_that_says_where(tmp_path):
    first = _write(tmp_path / "a.parquet", _texts(20))
    second = _write(tmp_path / "b.parquet", ["x", "y", None, None])
    with pytest.raises(BadRowError) as caught:
        embed([first, second], str(tmp_path / "out"), num_dimensions=3)
    assert str(caught.value) == f"{second}, row 2: text is null (2 of 4 rows are); remove those rows."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_dimensions": 0}, "num_dimensions must be at least 1, got 0."),
        ({"min_df": 0}, "min_df must be at least 1, got 0."),
        ({"seed": -1}, "seed must be at least 0 and below 2^32, got -1."),
        ({"prefix": "passage: "}, "prefix needs --model; omit it, or pass a model."),
        ({"shard": "0/2"}, "shard needs --model; omit it, or pass a model."),
        ({"device": "cpu"}, "device needs --model; omit it, or pass a model."),
        (
            {"num_dimensions": 40},
            "num_dimensions must be below the number of texts, 40, got 40; lower it or give more texts.",
        ),
        (
            {"num_dimensions": 5, "min_df": 10},
            "num_dimensions must be below the number of terms, 5 at min_df=10, got 5; lower it or give more text.",
        ),
        (
            {"num_dimensions": 5, "min_df": 40},
            "No term occurs in min_df=40 texts; lower min_df or give more text.",
        ),
        (
            {"num_dimensions": 5, "min_df": 50},
            "No term occurs in min_df=50 texts; lower min_df or give more text.",
        ),
    ],
)
def test_an_option_that_cannot_work_is_named(tmp_path, options, words):
    generator = np.random.default_rng(0)
    rows = [" ".join(generator.permutation([f"w{k}" for k in range(5) if (row + k) % 4])) for row in range(40)]
    path = _write(tmp_path / "text.parquet", rows)
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        embed(path, str(tmp_path / "out"), **options)
    assert os.listdir(tmp_path) == ["text.parquet"]


def test_no_source_is_overwritten(tmp_path, source):
    for output in (source, str(tmp_path / "." / "text.parquet")):
        with pytest.raises(ConfigError, match=r"is one of the sources; write the features to another file\.$"):
            embed(str(tmp_path), output)


def test_the_columns_are_checked_before_any_row_is_read(tmp_path, source, monkeypatch):
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("no row may be read"))
    out = str(tmp_path / "out")
    with pytest.raises(SchemaError, match=r"has no column 'body'; its columns are: chunk_id, text\. text_column"):
        embed(source, out, text_column="body")
    with pytest.raises(SchemaError, match=r"has a column 'chunk_id' already; give feature_column another name\.$"):
        embed(source, out, feature_column="chunk_id")
    number = _write(tmp_path / "number.parquet", list(range(3)))
    with pytest.raises(SchemaError, match="text_column 'text' must hold strings, not int64; name another column"):
        embed(number, out)
    one, two = (
        _write(tmp_path / f"{kind}.parquet", _texts(3), n=pa.array([1, 2, 3], kind)) for kind in ("int32", "int64")
    )
    with pytest.raises(SchemaError) as caught:
        embed([one, two], out)
    assert str(caught.value) == f"Column 'n' is int32 in {one} and int64 in {two}; write both with one type."
    with pytest.raises(SchemaError, match=r"^Columns \['n'\] are not in both"):
        embed([source, one], out)


@pytest.mark.parametrize(
    ("content", "fault"), [(b"", "is empty"), (b"not parquet", "is not a parquet file"), ("cut", "is cut off")]
)
def test_a_broken_file_is_named(tmp_path, source, content, fault):
    """arrow: an empty or cut-off file; the error names it, and nothing has been written."""
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(Path(source).read_bytes()[:-20] if content == "cut" else content)
    with pytest.raises(DataFileError, match=rf"^{re.escape(str(broken))} {fault}"):
        embed([source, str(broken)], str(tmp_path / "out"), num_dimensions=3)
    assert sorted(os.listdir(tmp_path)) == ["broken.parquet", "text.parquet"]


def test_text_that_is_not_utf8_is_an_error(tmp_path):
    column = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe")]
    )
    path = _write(tmp_path / "a.parquet", column)
    with pytest.raises(DataFileError, match=r"a\.parquet: text is not UTF-8"):
        embed(path, str(tmp_path / "out"), num_dimensions=3)


def test_a_source_that_matches_nothing_is_named(tmp_path):
    with pytest.raises(DataFileError, match=r"^source: nothing matches '.*missing-\*'; pass a parquet file"):
        embed(str(tmp_path / "missing-*"), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"^source must name at least one file"):
        embed([], str(tmp_path / "out"))


def test_without_scikit_learn_the_error_says_what_to_install(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(
        ConfigError, match=r"^embed without --model needs scikit-learn; pip install 'datamask_pl\[embed\]'\.$"
    ):
        embed(source, str(tmp_path / "out"), num_dimensions=3)


def test_the_module_is_imported_without_scikit_learn():
    code = "import sys, datamask_pl.commands.embed; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
