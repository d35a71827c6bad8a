"""Writes the small parquet files of the tests."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = {"id_column": "chunk_id", "quality_columns": {"quality_score": 1.0}, "feature_column": "feature_arr"}
PAGE_VALUES = 20


def make_table(num_rows, *, first_id=0, dim=4, feature_type=None, seed=0, **columns):
    """A table of random features; `columns` replace or add columns, None leaves one out."""
    rng = np.random.default_rng([seed, first_id])
    features = rng.normal(size=(num_rows, dim)).astype(np.float32)
    feature_type = feature_type or pa.list_(pa.float32(), dim)
    whole = {
        "chunk_id": pa.array(np.arange(first_id, first_id + num_rows)),
        "quality_score": pa.array(rng.random(num_rows).astype(np.float32)),
        "feature_arr": vectors(features, feature_type),
        **columns,
    }
    return pa.table({name: column for name, column in whole.items() if column is not None})


def vectors(features, feature_type):
    """Rows as an arrow column; rows may be None, of any length, and hold None."""
    convert = feature_type.value_type.to_pandas_dtype()
    rows = [None if row is None else [None if x is None else convert(x) for x in row] for row in features]
    return pa.array(rows, feature_type)


def find_pages(content):
    """Where the headers of data pages begin: type, size, size without compression, perhaps a checksum, a struct."""
    number = rb"\x15[\x80-\xff]*[\x00-\x7f]"
    return [header.start() for header in re.finditer(rb"\x15\x00" + number * 2 + rb"(?:%s)?\x2c" % number, content)]


def damage_page(path, column, page):
    """Turns one bit of a page's header, after which pyarrow leaves the page out; `page` may count from the end.

    Of a file without compression whose only row group has several pages a column; see `write_pages`.
    """
    group = pq.read_metadata(path).row_group(0)
    (chunk,) = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.split(".")[0] == column]
    content = bytearray(Path(path).read_bytes())
    start, stop = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    headers = find_pages(content[start:stop])
    assert len(headers) >= chunk.num_values // PAGE_VALUES
    content[start + headers[page] + 1] = 2  # an index page instead of a data page
    Path(path).write_bytes(content)


def write_pages(path, num_rows, *, dim=4):
    """A file of one row group, pages of a few values; no number in it looks like a page's header."""
    rows = np.arange(num_rows)
    features = (rows[:, None] * np.arange(3, 3 + dim) % 89 + 1).astype(np.float32)
    quality = pa.array((rows % 97).astype(np.float32))
    text = pa.array([f"text {row}" for row in rows])
    features = vectors(features, pa.list_(pa.float32(), dim))
    table = make_table(num_rows, quality_score=quality, feature_arr=features, text=text)
    options = {"compression": "none", "use_dictionary": False, "data_page_size": 1, "write_batch_size": PAGE_VALUES}
    return write(path, table, **options)


def write(path, table, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **kwargs)
    return str(path)
