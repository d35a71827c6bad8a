"""Damaged files beside shards and masks: ids, events, comparisons, and what commands leave for their next call."""

import json
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter

from datamask_pl.commands.apply import RECORD_NAME, Target
from datamask_pl.data.forced_ids import read_forced_ids
from datamask_pl.data.plan import plan_blocks
from datamask_pl.data.reader import BlockReader
from datamask_pl.data.schema import Columns, read_dataset
from datamask_pl.data.shards import iterate_ids, plain, plain_type, read_sources
from datamask_pl.embedding.files import TextFile, embed_file, is_finished
from datamask_pl.embedding.texts import read_corpus
from datamask_pl.evidence.comparison import TABLE, ComparedBlock, Comparison, Row
from datamask_pl.evidence.curves import read_scalars
from datamask_pl.io.parquet import find_column, open_parquet, read_shards, read_table
from datamask_pl.mask.filter import write_kept
from datamask_pl.mask.join import check_id_type
from tests.fuzz.damage import Known, damage, inputs, is_same, ours, spoil
from tests.support.shards import COLUMNS

IDS = {
    "int64": pa.array(range(10**15, 10**15 + 40)),
    "string": pa.array([f"id {row} ü" for row in range(40)]),
    "dictionary": pa.array([f"id {row}" for row in range(40)]).dictionary_encode(),
    "binary": pa.array([b"id %d" % row for row in range(40)]),
    "timestamp": pa.array(range(40), pa.timestamp("us")),
    "decimal": pa.array(range(40), pa.int64()).cast(pa.decimal128(20, 1)),
    "float": pa.array(np.arange(40) / 8),
}
KINDS = {name: ids.type for name, ids in IDS.items()} | {"bool": pa.bool_(), "date": pa.date32(), "uint8": pa.uint8()}


def read_ids(path, id_type):
    found = read_forced_ids(str(path), None, id_column="chunk_id", id_type=id_type)
    assert found is not None
    return found.keep


@pytest.fixture(scope="module")
def id_files(tmp_path_factory):
    """For each type the bytes of a parquet file of ids, and those of another."""
    path = tmp_path_factory.mktemp("ids") / "ids.parquet"
    contents = {}
    for name, ids in IDS.items():
        pair = []
        for part in (ids, ids[:20]):
            pq.write_table(pa.table({"chunk_id": part}), path, write_page_checksum=True, use_dictionary=False)
            pair.append(path.read_bytes())
        contents[name] = pair
    return Known(path=path, contents=contents)


@inputs(0.05)
@given(kind=st.sampled_from([*IDS]), changes=damage)
def test_a_damaged_parquet_file_of_ids_is_refused_or_read_as_it_was(id_files, kind, changes):
    whole, other = id_files.contents[kind]
    id_files.path.write_bytes(spoil(whole, [change for change in changes if change[0] != "footer"], other))
    with ours():
        assert read_ids(id_files.path, KINDS[kind]).equals(plain(IDS[kind]))


letters = st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])


@inputs(0.02)
@given(ids=st.lists(st.text(letters, min_size=1), unique=True), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
def test_every_line_of_a_text_file_of_ids_is_an_id(tmp_path_factory, ids, end, mark):
    path = tmp_path_factory.getbasetemp() / "ids.txt"
    text = "".join(id_ + end for id_ in ids)
    path.write_bytes(text.encode("utf-8-sig" if mark or text.startswith("\ufeff") else "utf-8"))
    with ours():
        assert read_ids(path, pa.string()).to_pylist() == ids
    if not text.startswith("PAR1"):
        read_ids(path, pa.string())


@inputs(0.03)
@given(
    kind=st.sampled_from([*KINDS]), content=st.binary(max_size=40) | st.text("0123456789-:. e+T\r\n").map(str.encode)
)
def test_any_bytes_are_ids_of_their_type_or_refused(tmp_path_factory, kind, content):
    path = tmp_path_factory.getbasetemp() / "ids.any"
    path.write_bytes(content)
    with ours():
        ids = read_ids(path, KINDS[kind])
        assert ids.type == plain_type(KINDS[kind])
        assert len(ids) <= content.count(b"\n") + 1
        assert ids.null_count == 0


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """A run's folder, its event file's bytes and numbers, and the bytes of another."""
    contents = []
    for scale in (1, 2):
        folder = tmp_path_factory.mktemp("events")
        writer = SummaryWriter(str(folder))
        for step in range(1, 9):
            writer.add_scalar("objective/f", step / 8 * scale, step)
            writer.add_histogram("logits", np.arange(20.0), step)
            writer.add_scalar("policy/churn", 1 / step, step)
        writer.close()
        (path,) = folder.iterdir()
        contents.append(path.read_bytes())
    return Known(path=path, whole=contents[1], other=contents[0], scalars=read_scalars(folder))


@inputs(0.06)
@given(changes=damage)
def test_a_damaged_event_file_gives_what_comes_before_and_says_so(events, changes):
    changes = [change for change in changes if change[0] != "footer"]
    content = spoil(events.whole, changes, events.other)
    events.path.write_bytes(content)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        scalars = read_scalars(events.path.parent)
    for name, numbers in scalars.items():
        assert numbers.items() <= events.scalars[name].items()
    # cut between two events, or one of them there twice: nobody can tell
    assert warned or set(split_events(content)) <= set(split_events(events.whole))


def split_events(content):
    """The bytes of every event of a file."""
    found, start = [], 0
    while start < len(content):
        end = start + 16 + int.from_bytes(content[start : start + 8], "little")
        found.append(content[start:end])
        start = end
    return found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A comparison, its file and the bytes of that, and those of another."""
    path = tmp_path_factory.mktemp("comparison") / "comparison.json"
    found = []
    for scale in (1.0, 2.0):
        rows = [
            Row(block=0, name=name, **{key: scale * place / 7 for place, key in enumerate(TABLE)})
            for name in ("mask", "random")
        ]
        found.append(
            Comparison(
                plan_hash="0" * 64,
                settings={"model.select_ratio": 0.1, "model.diversity": None},
                near_duplicate=0.95,
                seed=0,
                num_threads=1,
                blocks=[ComparedBlock(0, 100, 10, "f = 1 quality", ["a note ü"], rows)],
            )
        )
    one, other = (item.to_json().encode() for item in found)
    path.write_bytes(one)
    assert Comparison.read(path) == found[0]
    return Known(path=path, comparison=found[0], whole=one, other=other)


@inputs(0.04)
@given(changes=damage)
def test_a_damaged_comparison_is_refused_or_read_as_it_was(comparison, changes):
    changes = [change for change in changes if change[0] != "footer"]
    comparison.path.write_bytes(spoil(comparison.whole, changes, comparison.other))
    with ours():
        assert Comparison.read(comparison.path) == comparison.comparison


class Lengths:
    """Stands for a model: vectors of the texts' lengths."""

    num_dimensions = 3

    def encode(self, texts):
        return np.array([[len(text), 1, 2] for text in texts], dtype=np.float32)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A file that embed has written, and how: its bytes and rows, and the bytes of another."""
    folder = tmp_path_factory.mktemp("vectors")
    source, target = folder / "texts.parquet", folder / "vectors.parquet"
    contents = []
    for word in ("word", "words"):
        texts = pa.table({"chunk_id": range(50), "text": [word * (row + 1) for row in range(50)]})
        pq.write_table(texts, source)
        file = TextFile(*read_shards([source]), target)
        options = {"text_column": "text", "feature_column": "feature_arr", "settings": {"model": "m"}}
        embed_file(file, Lengths(), **options, advance=lambda num_rows: None)
        contents.append(target.read_bytes())
    return Known(file=file, target=target, rows=pq.read_table(target), whole=contents[1], other=contents[0])


@inputs(0.05)
@given(changes=damage)
def test_a_damaged_file_of_vectors_is_refused_or_read_as_it_was(vectors, changes):
    vectors.target.write_bytes(spoil(vectors.whole, changes, vectors.other))
    with ours():
        is_finished(vectors.file, {"model": "m"})
    vectors.target.write_bytes(spoil(vectors.whole, [change for change in changes if change[0] != "footer"], b""))
    with ours():
        dataset = read_dataset(str(vectors.target), Columns(**{**COLUMNS, "quality_columns": {"chunk_id": 1.0}}))
        plan = plan_blocks([file.row_group_rows for file in dataset.files], block_by="rows", block_size=99, seed=0)
        block, _ = BlockReader(dataset, quality_scaling="rank", on_bad_row="error").read(plan[0], 0)
        assert block.features_ND.tolist() == vectors.rows["feature_arr"].to_pylist()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A file that a mask is applied to, with costs and texts: its rows and bytes, and where the kept ones go."""
    folder = tmp_path_factory.mktemp("source")
    path = folder / "source.parquet"
    texts = [f"text {row}" for row in range(60)]
    rows = pa.table({"chunk_id": range(60), "cost": np.arange(60) / 8, "text": texts})
    pq.write_table(rows, path, row_group_size=25, write_page_checksum=True, use_dictionary=False)
    return Known(path=path, output=folder / "kept.parquet", rows=rows, whole=path.read_bytes())


@inputs(0.06)
@given(changes=damage)
def test_a_damaged_source_is_refused_or_read_as_it_was(source, changes):
    changes = [change for change in changes if change[0] != "footer"]
    source.path.write_bytes(spoil(source.whole, changes, b""))
    keep_N = np.arange(60) % 3 == 0
    with ours():
        (file,) = read_sources(str(source.path), "chunk_id")
        check_id_type(file, "chunk_id", pa.int64(), None)
        assert pa.concat_arrays([*iterate_ids(file, "chunk_id")]).to_pylist() == source.rows["chunk_id"].to_pylist()
        find_column(file.schema, file.name, "cost", "cost_column")
        with open_parquet(source.path) as parquet:
            assert is_same(read_table(parquet, str(source.path), ["cost"])["cost"], source.rows["cost"])
    with ours():
        corpus = read_corpus([source.path], text_column="text", feature_column="feature_arr")
        assert corpus.texts == source.rows["text"].to_pylist()
    with ours():
        (file,) = read_sources(str(source.path), "chunk_id")
        if file.num_rows == len(keep_N):
            write_kept(file, keep_N, source.output, lambda num_rows: None)
            kept = pq.read_table(source.output)
            for name in set(kept.column_names) & set(source.rows.column_names):
                assert is_same(kept[name], source.rows[name].filter(pa.array(keep_N)))


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """A folder that apply has filled: what was applied, the record's bytes, and those of another."""
    folder = tmp_path_factory.mktemp("applied")
    pq.write_table(pa.table({"chunk_id": range(9)}), folder / "source.parquet")
    sources = read_sources(str(folder / "source.parquet"), "chunk_id")
    output = folder / "output"
    output.mkdir()
    name = sources[0].relative_name
    keep = [np.arange(9) < 4]
    target = Target.open("output", output, sources, keep)
    pq.write_table(pa.table({"chunk_id": range(4)}), output / name)
    about = {"num_bytes": (output / name).stat().st_size, "num_rows": 4}
    target.files = {name: about}
    target.write_record()
    whole = (output / RECORD_NAME).read_bytes()
    return Known(output=output, sources=sources, keep=keep, files={name: about}, whole=whole)


@inputs(0.03)
@given(changes=damage)
def test_a_damaged_record_of_apply_is_refused_or_its_files_are_written_again(applied, changes):
    changes = [change for change in changes if change[0] != "footer"]
    (applied.output / RECORD_NAME).write_bytes(spoil(applied.whole, changes, b""))
    with ours():
        assert Target.open("output", applied.output, applied.sources, applied.keep).files in ({}, applied.files)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**400) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
PLACES = [("files",), ("selection",), ("format",), ("blocks",), ("blocks", 0), ("blocks", 0, "rows"), ("more",),
          ("blocks", 0, "rows", 0), ("blocks", 0, "rows", 1, "f"), ("blocks", 0, "rows", 0, "name"), ("settings",),
          ("sha256",), ()]  # fmt: skip


@inputs(0.02)
@given(place=st.sampled_from(PLACES), value=anything, nested=st.booleans())
def test_any_json_is_a_record_or_a_comparison_or_refused(applied, comparison, place, value, nested):
    for path, whole in ((applied.output / RECORD_NAME, applied.whole), (comparison.path, comparison.whole)):
        content = json.loads(whole)
        try:
            inner = content
            for key in place[:-1]:
                inner = inner[key]
            if place:
                inner[place[-1]] = value
            else:
                content = value
        except (KeyError, IndexError):
            continue
        path.write_text("[" * 10**5 if nested and not place else json.dumps(content))
    with ours():
        found = Target.open("output", applied.output, applied.sources, applied.keep)
        assert found.files in ({}, applied.files)
    with ours():
        assert Comparison.read(comparison.path) == comparison.comparison
