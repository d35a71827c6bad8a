"""Turns texts into features, offline: latent semantic analysis with scikit-learn.

Shape suffixes: N texts, T terms, D features.
"""

from __future__ import annotations

import os
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.atomic import atomic_path, local_path
from datamask_pl.data.files import Location, expand, open_parquet
from datamask_pl.errors import BadRowError, ConfigError, DataFileError, SchemaError

_ROW_GROUP_SIZE = 4096
_MAX_TERMS = 2**17  # bounds the decomposition's memory: T x D float32, 140 MB at 256 features
_NUM_POWER_ITERATIONS = 3
# A TF-IDF row has length 1, so that this is the share of it that D directions hold; below is rounding noise.
_MIN_NORM = 1e-5


@dataclass(frozen=True)
class Corpus:
    """The texts of some parquet files, and what else stands in their rows.

    Attributes:
        texts: N texts, in the order of the files and their rows.
        others: table of N rows with every column but the text.
        paths: the files.
        starts: for each file, the position of its first row in `texts`.
    """

    texts: list[str]
    others: pa.Table
    paths: list[str]
    starts: list[int]

    def place(self, position: int) -> str:
        """Names the file and row, from 0, of a text."""
        file = bisect_right(self.starts, position) - 1
        return f"{self.paths[file]}, row {position - self.starts[file]}"


def embed(
    source: str | list[str],
    output: str = "quickstart-data/features.parquet",
    *,
    encoder: Literal["lsa"] = "lsa",
    text_column: str = "text",
    feature_column: str = "feature_arr",
    num_dimensions: int = 256,
    min_df: int = 2,
    seed: int = 0,
) -> None:
    """Writes a feature vector for every text of some parquet files.

    Each vector has length 1 and is stored as a fixed-size list of float16. The other columns are carried unchanged,
    the text is not; rows keep their order. All texts are held in memory at once, as is their term matrix. Terms are
    words of two letters or digits and more, so that languages written without spaces need other features.

    Args:
        source: parquet files, folders, globs or fsspec URLs.
        output: parquet file to write; its folder is created.
        encoder: lsa is TF-IDF of words and pairs of words, then a truncated singular value decomposition.
        text_column: column that holds the text, of a string type.
        feature_column: column to write.
        num_dimensions: D, length of a vector; below both the number of texts and the number of terms.
        min_df: a term counts if it occurs in this many texts.
        seed: of the decomposition, which is randomised.

    Raises:
        ConfigError: If an option is out of range, scikit-learn is missing, output is one of the sources or no local
            path, or the texts have too few terms for num_dimensions.
        SchemaError: If the text column is missing or holds no strings, the feature column is there already, or
            two files disagree.
        DataFileError: If a file is missing, cannot be read, or cannot be written.
        BadRowError: If a text is null, or has no vector.
    """
    _check_options(encoder=encoder, num_dimensions=num_dimensions, min_df=min_df, seed=seed)
    target = local_path("output", output)
    files = expand(source, option="source")
    if os.path.realpath(target) in (os.path.realpath(file.path) for file in files if file.filesystem is None):
        raise ConfigError(f"output {output} is one of the sources; write the features to another file.")
    with atomic_path(target) as temporary:
        corpus = read_corpus(files, text_column=text_column, feature_column=feature_column)
        features_ND, share = lsa(corpus.texts, num_dimensions=num_dimensions, min_df=min_df, seed=seed)
        _check_vectors(features_ND, corpus, min_df)
        columns = [*corpus.others.columns, feature_array(features_ND)]
        field = pa.field(feature_column, columns[-1].type)
        table = pa.table(columns, schema=corpus.others.schema.append(field))
        # Half floats gain nothing from a dictionary and are slower to read through one.
        others = corpus.others.column_names
        options = {"use_dictionary": others, "write_page_checksum": True}
        pq.write_table(table, temporary, row_group_size=_ROW_GROUP_SIZE, **options)
    print(
        f"Embedded {len(corpus.texts)} texts in {num_dimensions} dimensions ({share:.1%} of their variance) "
        f"to {output}. Next: python cli.py fit --data.path {shlex.quote(output)}"
    )


def lsa(texts: Sequence[str], *, num_dimensions: int, min_df: int, seed: int) -> tuple[npt.NDArray[np.float32], float]:
    """Latent semantic analysis: the texts' strongest common directions in the space of their terms.

    X = TF-IDF with tf = 1 + ln(count) and idf = 1 + ln((1 + N) / (1 + texts with the term)), rows scaled to length 1;
    X ~ U S V', and the features are the rows of X V, scaled to length 1.

    Source: Deerwester et al., 1990, Indexing by Latent Semantic Analysis; the decomposition is that of Halko et al.,
    arXiv:0909.4061. The last bits depend on the machine and its number of threads.

    Args:
        texts: N texts.
        num_dimensions: D, below N and T.
        min_df: a term counts if it occurs in this many texts.
        seed: of the decomposition.

    Returns:
        float32 (N, D), rows of length 1, or of zeros where a text has no term that counts or none of its terms is
        in the D directions; and the share of the variance that the D directions explain, in [0, 1].

    Raises:
        ConfigError: If scikit-learn is missing, or D is not below N and T.

    Example:
        >>> texts = ["a red car", "the red car", "a tall tree", "the tall tree", ""]
        >>> features_ND, _ = lsa(texts, num_dimensions=2, min_df=2, seed=0)
        >>> (features_ND @ features_ND.T).round().astype(int).tolist()
        [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    """
    try:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ConfigError("encoder lsa needs scikit-learn; pip install 'datamask_pl[embed]'.") from error
    if num_dimensions >= len(texts):
        raise ConfigError(
            f"num_dimensions must be below the number of texts, {len(texts)}, got {num_dimensions}; "
            "lower it or give more texts."
        )
    vectorizer = TfidfVectorizer(
        sublinear_tf=True,
        dtype=np.float32,
        ngram_range=(1, 2),
        token_pattern=r"[^\W_]{2,}",  # the words of snake_case count one by one
        min_df=min_df,
        max_features=_MAX_TERMS,
    )
    try:
        terms_NT = vectorizer.fit_transform(texts)
    except ValueError as error:  # how scikit-learn says that no term is left
        raise ConfigError(f"No term occurs in min_df={min_df} texts; lower min_df or give more text.") from error
    num_terms = terms_NT.shape[1]
    if num_dimensions >= num_terms:
        raise ConfigError(
            f"num_dimensions must be below the number of terms, {num_terms} at min_df={min_df}, "
            f"got {num_dimensions}; lower it or give more text."
        )
    svd = TruncatedSVD(num_dimensions, n_iter=_NUM_POWER_ITERATIONS, random_state=seed)
    # Texts that are all the same have no variance to explain: 0 / 0.
    with np.errstate(invalid="ignore", divide="ignore"):
        projected_ND = svd.fit_transform(terms_NT)
    norm_N1 = np.linalg.norm(projected_ND, axis=1, keepdims=True)
    features_ND = np.where(norm_N1 > _MIN_NORM, projected_ND / np.maximum(norm_N1, _MIN_NORM), 0.0)
    share = float(np.nan_to_num(svd.explained_variance_ratio_.sum(), nan=1.0, posinf=1.0))
    return features_ND.astype(np.float32), share


def feature_array(features_ND: npt.NDArray[np.float32]) -> pa.ChunkedArray:
    """Returns the rows as fixed-size lists of float16, in chunks small enough for any row group.

    Example:
        >>> feature_array(np.eye(2, dtype=np.float32)).type
        FixedSizeListType(fixed_size_list<item: halffloat>[2])
    """
    num_dimensions = features_ND.shape[1]
    chunks = [
        pa.FixedSizeListArray.from_arrays(
            pa.array(features_ND[start : start + _ROW_GROUP_SIZE].astype(np.float16).ravel()), num_dimensions
        )
        for start in range(0, len(features_ND), _ROW_GROUP_SIZE)
    ]
    return pa.chunked_array(chunks, pa.list_(pa.float16(), num_dimensions))


def read_corpus(files: list[Location], *, text_column: str, feature_column: str) -> Corpus:
    """Reads the texts and the other columns of some files; checks every footer before it reads any row.

    Raises:
        SchemaError: As `embed`.
        DataFileError: If a file cannot be read.
        BadRowError: If a text is null.
    """
    paths = [file.name for file in files]
    schemas = []
    for file in files:
        with open_parquet(file) as parquet:
            schemas.append(parquet.schema_arrow)
    for path, schema in zip(paths, schemas, strict=True):
        _check_schema(path, schema, text_column, feature_column)
        _check_same(path, schema, paths[0], schemas[0])
    texts: list[str] = []
    starts: list[int] = []
    others: list[pa.Table] = []
    for path, file in zip(paths, files, strict=True):
        starts.append(len(texts))
        with open_parquet(file) as parquet:
            table = parquet.read()
        column = table[text_column].cast(pa.large_string())
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise BadRowError(
                f"{path}, row {row}: {text_column} is null ({column.null_count} of {len(column)} rows are); "
                "remove those rows."
            )
        try:
            texts += column.to_pylist()
        except UnicodeDecodeError as error:
            raise DataFileError(f"{path}: {text_column} is not UTF-8 ({error.reason}); write it again.") from error
        others.append(table.select([name for name in schemas[0].names if name != text_column]))
    # "default" evens out what is no type: nullability and metadata of the fields.
    return Corpus(texts, pa.concat_tables(others, promote_options="default"), paths, starts)


def _check_options(*, encoder: str, num_dimensions: int, min_df: int, seed: int) -> None:
    if encoder != "lsa":
        raise ConfigError(f"encoder must be one of: lsa; got {encoder!r}.")
    for option, value in (("num_dimensions", num_dimensions), ("min_df", min_df)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}.")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be at least 0 and below 2^32, got {seed}.")


def _check_vectors(features_ND: npt.NDArray[np.float32], corpus: Corpus, min_df: int) -> None:
    empty = np.flatnonzero(~features_ND.any(axis=1))
    if empty.size:
        first = int(empty[0])
        raise BadRowError(
            f"{corpus.place(first)}: no vector for {corpus.texts[first][:40]!r} (and {empty.size - 1} more of "
            f"{len(corpus.texts)} texts): none of its terms occurs in min_df={min_df} texts, or none is in the "
            f"num_dimensions={features_ND.shape[1]} strongest directions; "
            "remove those rows, lower min_df or raise num_dimensions."
        )


def _check_schema(path: str, schema: pa.Schema, text_column: str, feature_column: str) -> None:
    if text_column not in schema.names:
        raise SchemaError(f"{path} has no column {text_column!r}; set text_column to one of {schema.names}.")
    kind = schema.field(text_column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise SchemaError(f"{path}: text_column {text_column!r} must hold strings, not {kind}; name another column.")
    if feature_column in schema.names:
        raise SchemaError(f"{path} has a column {feature_column!r} already; give feature_column another name.")


def _check_same(path: str, schema: pa.Schema, first_path: str, first_schema: pa.Schema) -> None:
    """Compares names and types, in any order; nullability and metadata may differ."""
    if set(schema.names) != set(first_schema.names):
        differing = sorted(set(schema.names) ^ set(first_schema.names))
        raise SchemaError(f"Columns {differing} are not in both {first_path} and {path}; make the files alike.")
    for name in first_schema.names:
        expected, seen = first_schema.field(name).type, schema.field(name).type
        if expected != seen:
            raise SchemaError(
                f"Column {name!r} is {expected} in {first_path} and {seen} in {path}; write both with one type."
            )
