"""Writes the small parquet files of the tests."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = {"id_column": "chunk_id", "quality_columns": {"quality_score": 1.0}, "feature_column": "feature_arr"}


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


def write(path, table, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **kwargs)
    return str(path)
