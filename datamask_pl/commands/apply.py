"""Makes the filtered data set: the rows of the source shards that a mask keeps, with all their columns."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from datamask_pl.data.shards import SourceFile, check_outside, read_sources
from datamask_pl.errors import ConfigError, DataFileError, check_choice
from datamask_pl.io.atomic import atomic_path
from datamask_pl.io.paths import AnyPath, any_path, file_size, full_name, is_below, list_names, read_footer
from datamask_pl.io.records import DAMAGES, decode, encode
from datamask_pl.mask.filter import write_kept
from datamask_pl.mask.join import Join, OnDuplicate, OnMissing, Selection, find_selection
from datamask_pl.mask.limits import id_column_of
from datamask_pl.mask.manifest import read_complete

RECORD_NAME = "_apply.json"
RECORD_FORMAT = 1
_RECORD_EVERY_S = 2.0


def apply(
    mask: str,
    source: str | list[str],
    output: str,
    *,
    complement: str | None = None,
    id_column: str | None = None,
    join: Literal["auto", "row", "id"] = "auto",
    on_missing: Literal["error", "drop"] = "error",
    on_duplicate: Literal["error", "keep"] = "error",
    num_workers: int = 4,
) -> None:
    """Writes the rows that a mask keeps: every column, in the same order, in files of the same names.

    The source may be the files that the mask was learned from, or others with the same ids, such as the texts that
    the features were made from. Rows that the run dropped as bad are not kept. A row group without kept rows is
    omitted; a file without kept rows is written with 0 rows. Compression, encodings and the schema's
    metadata are those of the source. Nothing is written before the whole selection is known.

    Memory: a byte a source row, two with complement. By row, the ids that the mask selects. By id, all ids of the mask
    and a table of them, about 120 bytes an integer and 290 a string of 47 characters; with on_missing: drop, those
    of the selected ids alone. For each worker, some tens of megabytes and what is kept of one row group.

    Args:
        mask: folder of a finished mask, here or in an object store, which fit names at its end.
        source: parquet files, folders, globs or fsspec URLs; several as ["one", "two"].
        output: folder for the filtered files, here or in an object store (s3://, gs://, hf://), laid out as the source
            is below the folder that its files share. If it was begun before, with the same mask and source, it is
            finished.
        complement: folder for the rows that are not kept, if they are wanted.
        id_column: the source's column with the ids of the mask. Default: the one of the run.
        join: `row` matches by file and row number (needs the original files); `id` matches by id; `auto` uses `row` if
            file names, row counts and all kept ids agree with the mask, otherwise `id`.
        on_missing: with `join: id`, for rows whose id is not in the mask: `error`, or `drop` them.
        on_duplicate: with `join: id`, if ids are not unique: `error`, or `keep` every row whose id is selected.
        num_workers: files that are written at a time.

    Raises:
        ConfigError: If the mask is not finished, an option is out of range, or a folder for output holds something
            else or cannot be told from the source.
        SchemaError: If the id column is missing, or its type is not that of the mask's ids.
        DataFileError: If a file is missing, cannot be read, or cannot be written.
        BadRowError: If ids are missing from the mask or not unique, and that is not allowed.
    """
    check_choice("join", join, get_args(Join))
    check_choice("on_missing", on_missing, get_args(OnMissing))
    check_choice("on_duplicate", on_duplicate, get_args(OnDuplicate))
    if num_workers < 1:
        raise ConfigError(f"num_workers must be at least 1, got {num_workers}.")
    folders = _output_folders(output, complement)
    folder = any_path("mask", mask)
    manifest = read_complete(folder)
    id_column = id_column or id_column_of(manifest)
    sources = read_sources(source, id_column)
    check_outside(folders, source, [item.path for item in sources])
    selection = find_selection(
        folder,
        manifest,
        sources,
        id_column=id_column,
        join=join,
        on_missing=on_missing,
        on_duplicate=on_duplicate,
        num_workers=num_workers,
    )
    targets = [Target.open("output", folders["output"], sources, selection.keep)]
    if "complement" in folders:
        others = [~keep_N for keep_N in selection.keep]
        targets.append(Target.open("complement", folders["complement"], sources, others))
    num_written = _write_all(targets, sources, num_workers)
    print(_describe(targets, sources, selection, is_nothing_new=not num_written))


@dataclass
class Target:
    """A folder that is written, and the record in it of what has been.

    Attributes:
        folder: where.
        keep: for each source file, which of its rows go there.
        selection: hash of the source files and of which of their rows go there.
        files: rows and bytes of each file that is whole, by its name below the folder.
    """

    folder: AnyPath
    keep: list[NDArray[np.bool_]]
    selection: str
    files: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def open(cls, option: str, folder: AnyPath, sources: Sequence[SourceFile], keep: list[NDArray[np.bool_]]) -> Target:
        """Looks what is in the folder; writes nothing.

        Raises:
            ConfigError: If it holds something else.
            DataFileError: If it cannot be read.
        """
        target = cls(folder, keep, _hash_selection(sources, keep))
        path = folder / RECORD_NAME
        try:
            others = [name for name in list_names(folder) if not name.startswith(".")]
            record: dict[str, Any] = {"selection": None, "files": {}}
            if RECORD_NAME in others:
                record = decode(path.read_text(encoding="utf-8"), {"files": dict}, version=RECORD_FORMAT)
            saved, files = record["selection"], record["files"]
        except NotADirectoryError:
            raise ConfigError(f"{option} {folder} is a file; pass the path of a folder.") from None
        except DAMAGES as error:
            raise DataFileError(f"{path} cannot be read ({error}); choose another folder.") from error
        if RECORD_NAME not in others and others:
            raise ConfigError(f"{option} {folder} holds other things, such as {others[0]}; pass a new or empty folder.")
        # a record alone is of an attempt that wrote no file: its source was damaged, and may have been repaired
        if saved not in (None, target.selection) and others != [RECORD_NAME]:
            raise ConfigError(
                f"{option} {folder} was made with another mask or from another source; pass another folder."
            )
        names = [source.relative_name for source in sources if source.relative_name in files]
        target.files = {name: files[name] for name in names if _is_whole(folder / name, files[name])}
        return target

    def write_record(self) -> None:
        """Brings the record up to date."""
        with atomic_path(self.folder / RECORD_NAME) as temporary:
            text = encode({"selection": self.selection, "files": self.files}, version=RECORD_FORMAT)
            temporary.write_text(text, encoding="utf-8")


def _hash_selection(sources: Sequence[SourceFile], keep: Sequence[NDArray[np.bool_]]) -> str:
    digest = hashlib.sha256()
    for source, keep_N in zip(sources, keep, strict=True):
        digest.update(json.dumps([source.relative_name, source.num_bytes, source.row_group_rows]).encode())
        digest.update(np.packbits(keep_N).tobytes())
    return digest.hexdigest()


def _is_whole(path: AnyPath, written: dict[str, int]) -> bool:
    try:
        return file_size(path) == written["num_bytes"] and read_footer(path).num_rows == written["num_rows"]
    except DAMAGES:
        return False


def _write_all(targets: Sequence[Target], sources: Sequence[SourceFile], num_workers: int) -> int:
    """Writes every file that is not there yet. Returns how many those were."""
    jobs = [
        (target, source, keep_N)
        for target in targets
        for source, keep_N in zip(sources, target.keep, strict=True)
        if source.relative_name not in target.files
    ]
    if not jobs:
        return 0
    for target in targets:
        target.write_record()
    num_rows = sum(source.num_rows for _, source, _ in jobs)
    stop, lock = threading.Event(), threading.Lock()
    with (
        tqdm(total=num_rows, unit=" rows", unit_scale=True, disable=None) as bar,
        ThreadPoolExecutor(num_workers) as pool,
    ):

        def advance(count: int) -> None:
            if stop.is_set():
                raise _StoppedError
            with lock:
                bar.update(count)

        # Threads, not processes: pyarrow does the work outside of Python's lock.
        running = {
            pool.submit(write_kept, source, keep_N, target.folder / source.relative_name, advance): (target, source)
            for target, source, keep_N in jobs
        }
        written_s = time.monotonic()
        try:
            for future in as_completed(running):
                target, source = running[future]
                target.files[source.relative_name] = future.result()
                if time.monotonic() - written_s > _RECORD_EVERY_S:
                    target.write_record()
                    written_s = time.monotonic()
            for target in targets:
                target.write_record()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(jobs)


class _StoppedError(Exception):
    """Another worker failed, or the user pressed Ctrl-C."""


def _output_folders(output: str, complement: str | None) -> dict[str, AnyPath]:
    folders = {"output": any_path("output", output)}
    if complement is not None:
        folders["complement"] = any_path("complement", complement)
        one, other = (full_name(path) for path in folders.values())
        if is_below(one, other) or is_below(other, one):
            raise ConfigError(f"output {output} and complement {complement} must not lie in each other.")
    return folders


def _describe(
    targets: Sequence[Target], sources: Sequence[SourceFile], selection: Selection, *, is_nothing_new: bool
) -> str:
    num_rows = sum(source.num_rows for source in sources)
    num_files = len(sources)
    lines = ["nothing was left to do"] if is_nothing_new else []
    for label, target in zip(("kept", "left"), targets, strict=False):
        rows = sum(written["num_rows"] for written in target.files.values())
        num_bytes = sum(written["num_bytes"] for written in target.files.values())
        lines += [
            f"{label:<8}{rows:,} of {num_rows:,} rows in {num_files:,} file{'s' * (num_files > 1)}, "
            f"{_size(num_bytes)} of {_size(sum(source.num_bytes for source in sources))}, in {target.folder}"
        ]
    lines.append(f"joined  by {selection.joined_by}")
    if selection.num_absent:
        lines.append(f"note    {selection.num_absent:,} samples that the mask selects are not in the source")
    pattern = str(targets[0].folder / "**" / "*.parquet")
    lines.append(f'next    datasets.load_dataset("parquet", data_files={pattern!r}), or any reader of parquet')
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
