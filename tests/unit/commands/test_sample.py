"""The quickstart's corpus: real texts, the same every time, each with a score."""

import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.commands import sample as module
from datamask_pl.commands.sample import distinct_samples, quality_score, read_docstrings, sample, stdlib_folder
from datamask_pl.errors import ConfigError, DataFileError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The whole corpus, made once: the path of the file and the table."""
    path = tmp_path_factory.mktemp("corpus") / "new" / "text.parquet"
    sample(str(path))
    return path, pq.read_table(path)


def test_the_corpus_has_some_thousands_of_distinct_texts(corpus):
    path, table = corpus
    assert table.schema.names == ["chunk_id", "text", "quality_score"]
    assert table.schema.types == [pa.string(), pa.string(), pa.float32()]
    assert 4_000 <= table.num_rows <= 10_000
    ids, texts = table["chunk_id"].to_pylist(), table["text"].to_pylist()
    assert ids == sorted(set(ids))
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) >= 40
    assert pq.ParquetFile(path).num_row_groups > 3
    assert [name.name for name in path.parent.iterdir()] == ["text.parquet"]


def test_ids_name_what_the_texts_document(corpus):
    import json

    table = corpus[1]
    texts = dict(zip(table["chunk_id"].to_pylist(), table["text"].to_pylist(), strict=True))
    assert texts["json.dumps"].startswith("Serialize ``obj`` to a JSON formatted ``str``.")
    assert texts["json.decoder.JSONDecoder"].split() == json.JSONDecoder.__doc__.split()
    assert not [name for name in texts if {"test", "tests"} & set(name.split(".")[:-1])]


def test_scores_spread_and_do_not_merely_follow_length(corpus):
    table = corpus[1]
    scores = table["quality_score"].to_numpy()
    lengths = np.array([len(text) for text in table["text"].to_pylist()])
    assert scores.min() >= 0
    assert scores.max() <= 1
    assert scores.std() > 0.05
    rank = [values.argsort().argsort() for values in (scores, lengths)]
    assert np.corrcoef(rank)[0, 1] < 0.6


def test_a_second_run_writes_the_same_bytes_and_a_draw_is_a_subset_in_order(corpus, tmp_path, monkeypatch):
    table = corpus[1]
    rows = list(zip(table["chunk_id"].to_pylist(), table["text"].to_pylist(), strict=True))
    monkeypatch.setattr(module, "read_docstrings", lambda _: (module.Sample(*row) for row in reversed(rows)))
    sample(str(tmp_path / "again.parquet"))
    assert (tmp_path / "again.parquet").read_bytes() == corpus[0].read_bytes()

    drawn = []
    for seed in (1, 1, 2):
        sample(str(tmp_path / "few.parquet"), num_samples=100, seed=seed)
        drawn.append(pq.read_table(tmp_path / "few.parquet")["chunk_id"].to_pylist())
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert len(drawn[0]) == 100
    assert drawn[0] != drawn[2]
    assert set(drawn[0]) <= {name for name, _ in rows}


@pytest.fixture
def sources(tmp_path):
    """A folder of Python sources with one of each difficulty."""
    folder = tmp_path / "lib"
    for name in ("package", "test", "site-packages", "config-3.11"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text('"""Text of a package."""\n')
    (folder / "broken.py").write_text("print 'old'\n")
    (folder / "null.py").write_bytes(b"x = '\0'\n")
    (folder / "latin.py").write_bytes("# coding: latin-1\n'''Café.'''\n".encode("latin-1"))
    (folder / "escape.py").write_text('"""An old \\d escape."""\nassert (1, "always")\n')
    (folder / "package" / "inner.py").write_text(
        "raise SystemExit('imported')\n"
        "if True:\n    class A:\n"
        '        """Class A.\n\n           Indented.\n        """\n'
        "        @property\n        def x(self):\n            '''Get x.'''\n"
        "        @x.setter\n        def x(self, value):\n            '''Set x.'''\n"
        "try:\n    pass\nexcept ImportError:\n    async def f():\n        '''Function f.'''\n"
        "def g():\n    ''\n    return lambda: 'no docstring'\n"
    )
    return folder


def test_docstrings_are_found_wherever_definitions_stand_and_nothing_is_imported(sources):
    assert [tuple(found) for found in read_docstrings(sources)] == [
        ("escape", "An old \\d escape."),
        ("latin", "Café."),
        ("package", "Text of a package."),
        ("package.inner.A", "Class A.\n\nIndented."),
        ("package.inner.A.x", "Get x."),
        ("package.inner.A.x#2", "Set x."),
        ("package.inner.f", "Function f."),
    ]
    assert "package.inner" not in sys.modules


def test_of_equal_texts_the_first_by_id_stays():
    rows = [module.Sample("b", "same text"), module.Sample("c", "same text."), module.Sample("a", "same text")]
    assert [found.chunk_id for found in distinct_samples(iter(rows), 9)] == ["a", "c"]
    assert [found.chunk_id for found in distinct_samples(iter(rows), 10)] == ["c"]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("Return the sum of all items.", "sum(a, b, c, d) -> n = 0, 1, 2, 3"),
        ("Return the sum of all items.", "Return return return return return return."),
        ("Return the sum of all items.", "return the sum of all items"),
        ("Add.\n\n>>> add(a, b)\nc", "Add.\n\nadd(a, b)\nc..."),
        ("Return the sum of all items, which must be numbers of one type.", "Return the sum of all items."),
    ],
)
def test_the_score_prefers(better, worse):
    assert quality_score(better) > quality_score(worse)


@pytest.mark.parametrize("text", ["", "   ", "1234 ----", "\n\n"])
def test_a_text_without_letters_scores_zero(text):
    assert quality_score(text) == 0


@pytest.mark.parametrize("text", ["a", "Ein Wort.", "x y z" * 5000, "\n\nfoo\n\n \n\nBar.\n\n", "漢字かな。"])
def test_the_score_is_a_share(text):
    assert 0 < quality_score(text) < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, got 0."),
        ({"min_characters": 0}, "min_characters must be at least 1, got 0."),
        ({"min_characters": 10**9}, "min_characters=1000000000 leaves no text; lower it."),
    ],
)
def test_an_option_that_cannot_work_is_named(tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(module, "read_docstrings", lambda _: iter([module.Sample("a", "text")]))
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        sample(str(tmp_path / "text.parquet"), **options)
    assert list(tmp_path.iterdir()) == []


def test_more_samples_than_there_are_writes_all_and_says_so(tmp_path, monkeypatch, capsys):
    rows = [module.Sample("a", "x" * 40), module.Sample("b", "y" * 40)]
    monkeypatch.setattr(module, "read_docstrings", lambda _: iter(rows))
    output = tmp_path / "a folder" / "text.parquet"
    sample(str(output), num_samples=3)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert line.startswith("Wrote 2 of 2 documentation texts of Python 3.")
    features = tmp_path / "a folder" / "features.parquet"
    assert line.endswith(f" Next: python cli.py embed --source '{output}' --output '{features}'\n")


def test_a_python_without_source_files_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path / "python311.zip"))
    with pytest.raises(DataFileError, match=r"python311\.zip \(is this Python zipped, or compiled only\?\); run"):
        stdlib_folder()


def test_an_output_that_cannot_be_written_is_noticed_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "read_docstrings", lambda _: pytest.fail("the work must not start"))
    with pytest.raises(DataFileError, match="a part of the path is a file"):
        sample(str(tmp_path / "file" / "text.parquet"))
