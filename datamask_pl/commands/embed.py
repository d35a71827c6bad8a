"""Turns texts into features: latent semantic analysis, offline, or a sentence-transformers model.

Shape suffixes: N texts, T terms, D features.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from datamask_pl.data.plan import deal_blocks, parse_shard
from datamask_pl.data.shards import check_outside, relative_names
from datamask_pl.distributed.world import World
from datamask_pl.embedding.files import embed_file, is_finished, plan_files
from datamask_pl.embedding.model import Device, Precision, TextModel
from datamask_pl.embedding.texts import ROW_GROUP_SIZE, Corpus, feature_array, read_corpus
from datamask_pl.errors import BadRowError, ConfigError, check_choice, program
from datamask_pl.io.atomic import atomic_path, check_replaceable
from datamask_pl.io.dataset import expand
from datamask_pl.io.parquet import is_marked
from datamask_pl.io.paths import any_path, full_name

_ROW_GROUP_SIZE = ROW_GROUP_SIZE
_LSA_MARK = {b"datamask_pl_command": b"embed"}
_LSA_DEFAULTS = {"num_dimensions": 256, "min_df": 2, "seed": 0}
_MODEL_DEFAULTS: dict[str, Any] = {"prefix": None, "max_length": None, "batch_size": 64, "shard": "0/1"}
_MAX_TERMS = 2**17  # bounds the decomposition's memory: T x D float32, 140 MB at 256 features
_NUM_POWER_ITERATIONS = 3
# A TF-IDF row has length 1, so that this is the share of it that D directions hold; below is rounding noise.
_MIN_NORM = 1e-5


def embed(
    source: str | list[str],
    output: str = "quickstart-data/features.parquet",
    *,
    model: str | None = None,
    text_column: str = "text",
    feature_column: str = "feature_arr",
    num_dimensions: int | None = None,
    min_df: int | None = None,
    seed: int | None = None,
    prefix: str | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    shard: str | None = None,
) -> None:
    """Writes a feature vector for every text of some parquet files.

    Vectors are stored as fixed-size lists of float16. The other columns are carried unchanged, the text is not; rows
    keep their order.

    Without a model it is latent semantic analysis: TF-IDF of words and pairs of words, then a truncated singular value
    decomposition; vectors have length 1. It needs no network, and one file is written. All texts are held in memory at
    once, as is their term matrix. Terms are words of two letters or digits and more, so that languages written without
    spaces need a model.

    With a model it is a neural network of sentence-transformers, and vectors are normalised or not as the model does.
    Every source file gives a file of the same name in the output folder. Started again, whole files that were made by
    the same model from the same source are kept. Processes that torchrun or srun started take different files. Texts
    longer than the model reads are cut off. No code of the model's is executed, and weights must be safetensors.

    Args:
        source: parquet files, folders, globs or fsspec URLs; several as ["one", "two"].
        output: parquet file to write; with a model the folder to write to. Here or in an object store (s3://, gs://,
            hf://).
        model: folder of a sentence-transformers model, or its name on the Hugging Face hub.
        text_column: column that holds the text, of a string type.
        feature_column: column to write.
        num_dimensions: without a model, length of a vector, default 256; below both the number of texts and the
            number of terms.
        min_df: without a model, a term counts if it occurs in this many texts, default 2.
        seed: without a model, of the decomposition, which is randomised; default 0.
        prefix: with a model, put before every text, such as "passage: " for E5; by default as in the model's own
            configuration.
        max_length: with a model, tokens of a text that are read; by default as many as it can read.
        batch_size: with a model, texts that go through it at once, default 64.
        device: with a model, where it runs; auto is the GPU if there is one.
        precision: with a model, numbers that it computes in; auto is float32 on a CPU, and on a GPU bfloat16 for a
            model that is stored in it, else float16.
        shard: with a model, "i/n": this job takes every n-th file, from the i-th on, counted from 0; its processes
            share those. Default: 0/1.

    Raises:
        ConfigError: If an option is out of range or goes with the other way only, a package is missing, output is one
            of the sources or in their folder, a model cannot be loaded, or the texts have too few terms for
            num_dimensions.
        SchemaError: If the text column is missing or holds no strings, the feature column is there already, or
            two files disagree.
        DataFileError: If a file is missing, cannot be read, or cannot be written.
        BadRowError: If a text is null, or empty, or has no vector.
    """
    given_lsa = {"num_dimensions": num_dimensions, "min_df": min_df, "seed": seed}
    given_model = {"prefix": prefix, "max_length": max_length, "batch_size": batch_size, "shard": shard}
    if model is None:
        _check_absent(given_model, device=device, precision=precision)
        _embed_lsa(source, output, text_column=text_column, feature_column=feature_column, options=given_lsa)
        return
    for option, value in given_lsa.items():
        if value is not None:
            raise ConfigError(f"{option} is for embed without --model; omit it, or --model.")
    _embed_model(
        source,
        output,
        model=model,
        text_column=text_column,
        feature_column=feature_column,
        options=given_model,
        device=device,
        precision=precision,
    )


def _embed_lsa(
    source: str | list[str], output: str, *, text_column: str, feature_column: str, options: dict[str, Any]
) -> None:
    chosen = {name: _LSA_DEFAULTS[name] if value is None else value for name, value in options.items()}
    _check_lsa(**chosen)
    target = any_path("output", output)
    files = expand(source, option="source")
    if full_name(target) in (full_name(file) for file in files):
        raise ConfigError(f"output {output} is one of the sources; write the features to another file.")
    check_replaceable("output", target, lambda path: is_marked(path, _LSA_MARK))
    with atomic_path(target) as temporary:
        corpus = read_corpus(files, text_column=text_column, feature_column=feature_column)
        features_ND, share = lsa(corpus.texts, **chosen)
        _check_vectors(features_ND, corpus, chosen["min_df"])
        columns = [*corpus.others.columns, feature_array(features_ND)]
        field = pa.field(feature_column, columns[-1].type)
        schema = corpus.others.schema.append(field)
        table = pa.table(columns, schema=schema.with_metadata({**(schema.metadata or {}), **_LSA_MARK}))
        # Half floats gain nothing from a dictionary and are slower to read through one.
        others = corpus.others.column_names
        options = {"use_dictionary": others, "write_page_checksum": True}
        pq.write_table(table, temporary, row_group_size=_ROW_GROUP_SIZE, **options)
    print(
        f"Embedded {len(corpus.texts)} texts in {chosen['num_dimensions']} dimensions ({share:.1%} of their variance) "
        f"to {output}. Next: {program()} fit --data.path {shlex.quote(output)}"
    )


def _embed_model(
    source: str | list[str],
    output: str,
    *,
    model: str,
    text_column: str,
    feature_column: str,
    options: dict[str, Any],
    device: Device,
    precision: Precision,
) -> None:
    chosen = {name: _MODEL_DEFAULTS[name] if value is None else value for name, value in options.items()}
    _check_model(output, chosen["max_length"], chosen["batch_size"], device, precision)
    shard = parse_shard(chosen["shard"], "shard")
    world = World.launched()
    folder = any_path("output", output)
    locations = expand(source, option="source")
    check_outside({"output": folder}, source, locations)
    names = relative_names(locations)
    columns = {"text_column": text_column, "feature_column": feature_column}
    files = plan_files(locations, [folder / name for name in names], **columns)
    mine = [files[index] for index in deal_blocks(len(files), shard=shard, group=(world.group, world.num_groups))]
    encoder = TextModel(
        name=model,
        prefix=chosen["prefix"],
        max_length=chosen["max_length"],
        batch_size=chosen["batch_size"],
        device=device,
        precision=precision,
        local_rank=world.local_rank,
    )
    settings = {
        "model_hash": encoder.hash,
        "precision": encoder.precision,
        "prefix": chosen["prefix"],
        "max_length": chosen["max_length"],
        **columns,
    }
    left = [file for file in mine if not is_finished(file, settings)]
    num_texts = sum(file.shard.num_rows for file in left)
    with tqdm(total=num_texts, unit=" texts", unit_scale=True, disable=None) as bar:
        for file in left:
            embed_file(file, encoder, **columns, settings=settings, advance=bar.update)
    whose = f" of rank {world.rank} of {world.size}" if world.size > 1 else ""
    kept = f", {len(mine) - len(left)} were there before" if len(left) < len(mine) else ""
    print(
        f"Embedded {num_texts} texts in {encoder.num_dimensions} dimensions, {len(left)} of {len(mine)} "
        f"files{whose}{kept}, {encoder.precision} on {encoder.device}, to {folder}. "
        f"Next: {program()} fit --data.path {shlex.quote(str(folder))}"
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
        raise ConfigError("embed without --model needs scikit-learn; pip install 'datamask_pl[embed]'.") from error
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


def _check_absent(given: dict[str, Any], *, device: str, precision: str) -> None:
    """Refuses options that need a model, and processes that would all do the same."""
    named = {**given, "device": None if device == "auto" else device}
    named["precision"] = None if precision == "auto" else precision
    for option, value in named.items():
        if value is not None:
            raise ConfigError(f"{option} needs --model; omit it, or pass a model.")
    world = World.launched()
    if world.size > 1:
        raise ConfigError(
            f"embed without --model decomposes all texts together, in one process, but this is rank "
            f"{world.rank} of {world.size}; start one, or pass a model."
        )


def _check_lsa(*, num_dimensions: int, min_df: int, seed: int) -> None:
    for option, value in (("num_dimensions", num_dimensions), ("min_df", min_df)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}.")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be at least 0 and below 2^32, got {seed}.")


def _check_model(output: str, max_length: int | None, batch_size: int, device: str, precision: str) -> None:
    if output.endswith(".parquet"):
        raise ConfigError(f"output must be a folder where there is a model, got {output}: each source gives a file.")
    for option, value in (("max_length", max_length), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}.")
    check_choice("device", device, get_args(Device))
    check_choice("precision", precision, get_args(Precision))


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
