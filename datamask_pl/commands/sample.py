"""A small real text corpus, made from the documentation that comes with the installed Python.

It needs neither a network nor a licence: the texts are the docstrings of the standard library, read from its source
files, which are parsed and never imported. Many resemble each other, such as the methods of a base class and of its
children: a mask should keep few of these.
"""

from __future__ import annotations

import ast
import math
import platform
import re
import shlex
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.errors import ConfigError, DataFileError, program
from datamask_pl.io.atomic import atomic_path, check_replaceable, local_path
from datamask_pl.io.parquet import is_marked

_ROW_GROUP_SIZE = 1024
# Its test suites are skipped: their docstrings are notes, and some distributions of Python come without them.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_MARK = {b"datamask_pl_command": b"sample"}
_SCHEMA = pa.schema(
    [
        pa.field("chunk_id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("quality_score", pa.float32(), nullable=False),
    ],
    metadata=_MARK,
)
_WORD = re.compile(r"[^\W\d_]+")
_NUM_VARIETY_WORDS = 50
_LENGTH_SCALE = 30.0


class Sample(NamedTuple):
    """One docstring: its place, as `module.qualname`, and its text without indentation."""

    chunk_id: str
    text: str


def sample(
    output: str = "quickstart-data/text.parquet",
    *,
    num_samples: int | None = None,
    min_characters: int = 40,
    seed: int = 0,
) -> None:
    """Writes a small real text corpus made from the documentation of the installed Python, for the quickstart.

    One row for each docstring of a module, class or function of the standard library, sorted by id. Of texts that
    are exactly equal the first is kept; texts that are nearly equal all stay. Columns: `chunk_id` (string,
    "module.qualname"), `text` (string), `quality_score` (float32, see `quality_score`).

    Args:
        output: parquet file to write; its folder is created.
        num_samples: how many of the texts to write, drawn at random; all of them by default.
        min_characters: shortest text that counts as one.
        seed: what the draw depends on; without `num_samples` nothing is drawn.

    Raises:
        ConfigError: If num_samples or min_characters is below 1, or no text is that long, or output is not a local
            path, or names a file of another origin.
        DataFileError: If the standard library has no source files here, or output cannot be written.
    """
    for option, value in (("num_samples", num_samples), ("min_characters", min_characters)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}.")
    target = local_path("output", output)
    check_replaceable("output", target, lambda path: is_marked(path, _MARK))
    with atomic_path(target) as temporary:
        samples = distinct_samples(read_docstrings(stdlib_folder()), min_characters)
        if not samples:
            raise ConfigError(f"min_characters={min_characters} leaves no text; lower it.")
        num_found = len(samples)
        if num_samples is not None and num_samples < num_found:
            rows = np.random.default_rng(seed).choice(num_found, num_samples, replace=False)
            samples = [samples[row] for row in sorted(rows)]
        scores = [quality_score(text) for _, text in samples]
        ids, texts = zip(*samples, strict=True)
        table = pa.table([ids, texts, np.array(scores, np.float32)], schema=_SCHEMA)
        options = {"compression": "zstd", "write_page_checksum": True}
        pq.write_table(table, temporary, row_group_size=_ROW_GROUP_SIZE, **options)
    command = shlex.join(["--source", output, "--output", str(target.with_name("features.parquet"))])
    print(
        f"Wrote {len(samples)} of {num_found} documentation texts of Python {platform.python_version()} to {output}. "
        f"Next: {program()} embed {command}"
    )


def stdlib_folder() -> Path:
    """Returns the folder of the standard library's source files.

    Raises:
        DataFileError: If there is none, as in a Python that is packed in a zip file or comes compiled only.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "ast.py").is_file():
        raise DataFileError(
            f"The standard library's source files are not in {folder} (is this Python zipped, or compiled only?); "
            "run the command with a Python that comes with them."
        )
    return folder


def read_docstrings(folder: Path) -> Iterator[Sample]:
    """Yields every docstring below a folder of Python sources, in the order of the files and of their lines.

    A file that this Python cannot parse is passed over. A name that is defined again, as by a property's setter,
    gets the id "name#2".

    Raises:
        DataFileError: If a file cannot be read.
    """
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if _SKIPPED.intersection(parts) or not all(part.isidentifier() for part in parts):
            continue
        try:
            source = path.read_bytes()
        except OSError as error:
            raise DataFileError(f"{path} cannot be read: {error.strerror}; make it readable.") from error
        module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        try:
            with warnings.catch_warnings():
                # Old sources hold escapes that newer parsers warn of; it is not for the user to repair them.
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        num_seen: dict[str, int] = {}
        for name, text in _walk(tree, module):
            num_seen[name] = num_seen.get(name, 0) + 1
            yield Sample(name if num_seen[name] == 1 else f"{name}#{num_seen[name]}", text)


def distinct_samples(samples: Iterator[Sample], min_characters: int) -> list[Sample]:
    """Returns the samples that are long enough, sorted by id, each text once.

    Example:
        >>> distinct_samples(iter([Sample("b", "same"), Sample("a", "same"), Sample("c", "no")]), 3)
        [Sample(chunk_id='a', text='same')]
    """
    first: dict[str, Sample] = {}
    for found in sorted(samples):
        if len(found.text) >= min_characters:
            first.setdefault(found.text, found)
    return list(first.values())


def quality_score(text: str) -> float:
    """Scores how much a text reads like careful documentation.

    score = (length + letters + variety + sentences) / 4, where with words being runs of letters

        length     1 - exp(-words / 30): more is better, and hardly so beyond 100 words
        letters    letters / characters that are no white space: tables and signatures score low
        variety    different words / words, in lower case, of the first 50 words
        sentences  paragraphs that begin with a capital and end with one of . ! ? : or that are an
                   example (>>>), divided by paragraphs

    The other three do not grow with length; longer texts tend to score lower in them. The score is a heuristic for
    trying the tool; use a trained classifier for a real corpus.

    Args:
        text: any text.

    Returns:
        The score in [0, 1]; 0 for a text without letters.

    Example:
        >>> round(quality_score("Return the sum of a and b."), 3), quality_score("----")
        (0.79, 0.0)
    """
    words = [word.lower() for word in _WORD.findall(text)]
    if not words:
        return 0.0
    length = 1.0 - math.exp(-len(words) / _LENGTH_SCALE)
    letters = sum(map(len, words)) / len("".join(text.split()))
    head = words[:_NUM_VARIETY_WORDS]
    variety = len(set(head)) / len(head)
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text.strip())]
    sentences = sum(map(_is_whole, paragraphs)) / len(paragraphs)
    return (length + letters + variety + sentences) / 4.0


def _is_whole(paragraph: str) -> bool:
    return paragraph.startswith(">>>") or (paragraph[0].isupper() and paragraph[-1] in ".!?:")


def _walk(node: ast.AST, name: str) -> Iterator[Sample]:
    """Yields the docstrings of a node and of the definitions in it, also those under an `if` or a `try`."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = (ast.get_docstring(node) or "").strip()
        if text:
            yield Sample(name, text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _walk(child, f"{name}.{child.name}")
        # Expressions hold no definition; skipping them is most of the speed.
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _walk(child, name)
