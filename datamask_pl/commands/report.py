"""The `report` command: one HTML file about a mask, which opens offline."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datamask_pl.data.shards import SourceFile, plain, read_sources
from datamask_pl.errors import ConfigError, SchemaError, program
from datamask_pl.evidence.comparison import (
    COMPARISON_JSON,
    HIGHER_IS_BETTER,
    TABLE,
    Comparison,
    Row,
    describe_legend,
    format_row,
)
from datamask_pl.evidence.kept_share import Lengths, Share, by_group, by_length
from datamask_pl.evidence.run import FinishedRun, find_mask, open_run
from datamask_pl.io.atomic import atomic_path, check_replaceable, has_mark, local_path
from datamask_pl.io.parquet import iterate_batches, open_parquet
from datamask_pl.io.paths import AnyPath, redact
from datamask_pl.mask.join import find_selection
from datamask_pl.mask.manifest import read_complete
from datamask_pl.mask.summary import COMPARED, Summary, summarize

REPORT_NAME = "report.html"
_TEMPLATE = "report.html.jinja"
MAX_POINTS = 4000
_NUM_WORKERS = 4
_BATCH_ROWS = 1 << 14


def report(
    run: str | None = None,
    *,
    mask: str | None = None,
    source: str | list[str] | None = None,
    output: str | None = None,
    block: int | None = None,
    group_column: str | None = None,
    length_column: str | None = None,
    metadata: str | list[str] | None = None,
    max_samples: int = 20_000,
    num_clusters: int = 20,
    seed: int = 0,
) -> None:
    """Writes one HTML file about a mask: its value, its learning curves, what it kept. The file needs no network.

    Includes the table of `compare` if that was run before; the value of an exported mask comes from there alone. Needs
    matplotlib and jinja2.

    Args:
        run: folder of the run, as fit prints it at the end.
        mask: folder of a mask, instead of the run, such as one that export made; without learning curves.
        source: the files from which the mask was learned, if they have moved.
        output: HTML file to write. Default: report.html in the run's folder, or in NAME-evidence next to a mask outside
            a run.
        block: block whose features are shown. Default: the first finished block.
        group_column: column whose values are the groups of the kept shares.
        length_column: column of lengths for the kept shares: numbers, or texts, whose characters are counted.
        metadata: parquet files with these columns and the ids of the mask. Default: the source.
        max_samples: for larger blocks, a random subset of this size is clustered.
        num_clusters: number of clusters of the features.
        seed: of the clusters and random subsets.

    Raises:
        ConfigError: If an option is out of range, matplotlib or jinja2 is missing, or the mask was learned from other
            files.
        DataFileError: If there is no mask, or a file is missing, has changed or cannot be written.
        SchemaError: If a column is missing or has an unsupported type.
    """
    _check_options(max_samples=max_samples, num_clusters=num_clusters, seed=seed)
    found, folder = find_mask(run, mask, None)
    path = folder / REPORT_NAME if output is None else local_path("output", output)
    finished = open_run(found, folder, source=source)
    shown = min(finished.manifest.blocks) if block is None else block
    if shown not in finished.manifest.blocks:
        raise ConfigError(
            f"block must be a finished one, from {min(finished.manifest.blocks)} to {max(finished.manifest.blocks)}; "
            f"got {shown}."
        )
    check_replaceable("output", path, _is_report)
    # opened first, so that a read-only folder is noticed before the work
    with atomic_path(path) as temporary:
        tables = _tables(finished, metadata or source, group_column=group_column, length_column=length_column)
        pictures, curves_text = _pictures(
            finished, shown, max_samples=max_samples, num_clusters=num_clusters, seed=seed, has_curves=run is not None
        )
        text = _render(finished, pictures, tables, shown=shown, max_samples=max_samples, curves_text=curves_text)
        temporary.write_text(text, encoding="utf-8")
    print(f"written {path} ({len(text) / 1e6:.1f} MB); open it in any browser")
    if not (folder / COMPARISON_JSON).exists():
        named = f"--{'run' if run else 'mask'} {shlex.quote(run or str(mask))}"
        print(f"next    {program()} compare {named} adds a table of baselines")


def _is_report(path: AnyPath) -> bool:
    """Whether a file is a report; before they named their generator, they had this policy and title."""
    before = ("default-src 'none'; img-src data:; style-src 'unsafe-inline'", "<title>Mask ")
    return has_mark(path, 'content="datamask_pl report"') or all(has_mark(path, mark) for mark in before)


def _check_options(*, max_samples: int, num_clusters: int, seed: int) -> None:
    missing = [package for package in ("matplotlib", "jinja2") if find_spec(package) is None]
    if missing:
        raise ConfigError(f"report needs {' and '.join(missing)}; pip install 'datamask_pl[report]'.")
    for option, value in (("max_samples", max_samples), ("num_clusters", num_clusters)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be 0 <= seed < 2^63, got {seed}.")


# ---- kept shares by columns of the source


def _tables(
    run: FinishedRun, metadata: str | list[str] | None, *, group_column: str | None, length_column: str | None
) -> dict[str, Any]:
    """Kept shares by group and by length, for the template."""
    tables: dict[str, Any] = {"groups": None, "lengths": None}
    if group_column is None and length_column is None:
        return tables
    manifest = read_complete(run.mask)
    id_column = run.data.columns.id_column
    sources = read_sources(metadata or run.data.path, id_column)
    for column in filter(None, (group_column, length_column)):
        for source in (source for source in sources if source.num_rows):
            _check_column(source, column, is_length=column == length_column)
    selection = find_selection(
        run.mask,
        manifest,
        sources,
        id_column=id_column,
        join="auto",
        on_missing="drop",
        on_duplicate="keep",
        num_workers=_NUM_WORKERS,
    )
    overall = sum(int(keep_N.sum()) for keep_N in selection.keep) / max(1, sum(map(len, selection.keep)))
    if overall == 0:
        raise ConfigError("metadata: the mask keeps none of the ids in these files; pass files with its ids.")
    pieces = partial(_pieces, sources, selection.keep)
    if group_column is not None:
        rows = by_group(pieces(group_column))
        tables["groups"] = {"column": group_column, "rows": rows, "overall": overall, "top": _top(rows)}
    if length_column is not None and (lengths := by_length(pieces(length_column))) is not None:
        tables["lengths"] = {"column": length_column, **_length_table(lengths)}
    return tables


def _pieces(
    sources: list[SourceFile], keep: list[NDArray[np.bool_]], column: str
) -> Iterator[tuple[pa.Array, NDArray[np.bool_]]]:
    for source, keep_N in zip(sources, keep, strict=True):
        if not source.num_rows:
            continue
        start = 0
        with open_parquet(source.path) as parquet:
            name = source.name
            for batch in iterate_batches(parquet, name, batch_rows=_BATCH_ROWS, columns=[column]):
                yield plain(batch.column(0)), keep_N[start : start + len(batch)]
                start += len(batch)


def _check_column(source: SourceFile, column: str, *, is_length: bool) -> None:
    with open_parquet(source.path) as parquet:
        schema = parquet.schema_arrow
    if column not in schema.names:
        raise SchemaError(
            f"{source.name} has no column {column!r}; its columns are: {', '.join(schema.names)}. If other "
            "files with the same ids have it, pass them as --metadata."
        )
    data_type = schema.field(column).type
    is_number = pa.types.is_integer(data_type) or pa.types.is_floating(data_type)
    is_text = pa.types.is_string(data_type) or pa.types.is_large_string(data_type) or pa.types.is_string_view(data_type)
    if is_length and not (is_number or is_text):
        raise SchemaError(f"{source.name}: length column {column!r} must hold numbers or texts, not {data_type}.")
    if pa.types.is_nested(data_type):
        raise SchemaError(f"{source.name}: group column {column!r} must hold one plain value per row, not {data_type}.")


def _top(rows: list[Share]) -> float:
    return max((row.share for row in rows), default=0.0) or 1.0


def _length_table(lengths: Lengths) -> dict[str, Any]:
    return {
        "unit": lengths.unit,
        "rows": lengths.tenths,
        "top": _top(lengths.tenths),
        "median": f"{lengths.median:,.6g}",
        "median_kept": f"{lengths.median_kept:,.6g}",
        "num_null": lengths.num_null,
    }


# ---- text and numbers


def _pictures(
    run: FinishedRun, shown: int, *, max_samples: int, num_clusters: int, seed: int, has_curves: bool
) -> tuple[dict[str, str], str]:
    """Every picture by name, and a caption of the curves."""
    from datamask_pl.evidence import pictures as made  # here: _check_options reports a missing matplotlib first

    pictures = made.part_pictures(run)
    pictures |= made.feature_pictures(
        run, shown, max_samples=max_samples, max_points=MAX_POINTS, num_clusters=num_clusters, seed=seed
    )
    pictures["curves"], caption = (made.curves(run) if has_curves else None) or ("", "")
    return pictures, caption


def _render(
    run: FinishedRun,
    pictures: dict[str, str],
    tables: dict[str, Any],
    *,
    shown: int,
    max_samples: int,
    curves_text: str,
) -> str:
    manifest = run.manifest
    summary = summarize(manifest.blocks)
    num_in_block = manifest.blocks[shown].num_samples
    of_which = f"block {shown}" if manifest.num_blocks > 1 else "the block"
    comparison, notes = _comparison(run)
    if run.is_exported:
        made_from = ", ".join(
            dict.fromkeys(str((entry.made_from or {}).get("mask")) for entry in manifest.blocks.values())
        )
        notes.append(f"This mask was exported from the logits of {redact(made_from)}, without training.")
    if len(manifest.blocks) < manifest.num_blocks:
        notes.append(f"{len(manifest.blocks)} of {manifest.num_blocks} blocks are finished and shown.")
    config = json.dumps(_redacted(manifest.config), indent=2, ensure_ascii=False)
    shared = {redact(name): None for name in manifest.files}
    more = f" and {len(shared) - 10:,} more" if len(shared) > 10 else ""
    return render_html(
        pictures=pictures,
        name=run.root.resolve().name if isinstance(run.root, Path) else run.root.name,
        folder=str(run.root),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tiles=_tiles(summary),
        notes=notes,
        worth=_worth(run, summary),
        comparison=comparison,
        curves_text=curves_text,
        map_text=_sampled(max_samples, num_in_block, of_which),
        points_text=_sampled(min(MAX_POINTS, max_samples), num_in_block, of_which),
        settings=[(name, _shown(value)) for name, value in manifest.settings.items()],
        plan_hash=manifest.plan_hash,
        files_text=", ".join(list(shared)[:10]) + more,
        versions=list(manifest.versions.items()),
        config=config,
        **tables,
    )


def render_html(*, pictures: dict[str, str], **content: Any) -> str:  # noqa: ANN401
    """The report as one HTML document that loads nothing. Everything but the pictures is escaped.

    Args:
        pictures: SVG elements by name, drawn by this package.
        content: the names that the template uses.
    """
    from jinja2 import Environment, StrictUndefined  # optional, as is markupsafe
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": lambda share: f"{share:.1%}", "count": lambda number: f"{number:,}"}
    template = environment.from_string((files("datamask_pl.evidence") / _TEMPLATE).read_text(encoding="utf-8"))
    return template.render(pictures={name: Markup(picture) for name, picture in pictures.items()}, **content)


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    tiles = [
        ("samples", f"{summary.num_samples:,}"),
        ("kept", f"{summary.num_selected:,}"),
        ("share kept", f"{summary.num_selected / summary.num_samples:.2%}"),
        ("block" if summary.num_blocks == 1 else "blocks", f"{summary.num_blocks:,}"),
        ("seconds", f"{summary.seconds:,.1f}"),
    ]
    return tiles + ([("bad rows dropped", f"{summary.num_dropped:,}")] if summary.num_dropped else [])


def _worth(run: FinishedRun, summary: Summary) -> dict[str, Any] | None:
    if not summary.values:  # an exported mask
        return None
    mask, random, top = (summary.values[key] for key in COMPARED)
    names = [term.name for term in run.objective.terms]
    weights = " + ".join(
        f"{term.weight:g} {term.name}" + (" / its spread" if run.learner.method.calibrate else "")
        for term in run.objective.terms
    )
    spread = " The spread is the standard deviation over random masks." if run.learner.method.calibrate else ""
    return {
        "sentence": f"f = {weights}, higher is better: {mask.f:.5g} for the mask, {mask.f - random.f:+.4g} against "
        f"a random one of the same size and {mask.f - top.f:+.4g} against the one of highest quality.{spread}"
        + (" Means over the blocks, weighted by their samples." if summary.num_blocks > 1 else ""),
        "terms": names,
        "rows": [
            {"name": label, "f": f"{values.f:.6g}", "terms": [f"{values.terms[name]:.6g}" for name in names]}
            for label, values in ((label, summary.values[key]) for key, label in COMPARED.items())
        ],
    }


def _comparison(run: FinishedRun) -> tuple[dict[str, Any] | None, list[str]]:
    """The record of `compare` for the template, and notes; None if it belongs to another mask."""
    path = run.folder / COMPARISON_JSON
    if not path.exists():
        return None, []
    found = Comparison.read(path)
    if (found.plan_hash, found.settings) != (run.manifest.plan_hash, run.manifest.settings):
        return None, [f"{path} belongs to another mask and is not shown; run compare again."]
    blocks = [{**vars(block), "rows": _cells(block.rows)} for block in found.blocks]
    legend = describe_legend(found.near_duplicate)
    return {"titles": [title for title, _ in TABLE.values()], "blocks": blocks, "legend": legend}, []


def _cells(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows of a block with the best number per column marked, except time and overlap."""
    best: dict[str, float] = {name: max(getattr(row, name) for row in rows) for name in HIGHER_IS_BETTER}
    best["near_duplicates"] = min(row.near_duplicates for row in rows)
    shown = []
    for row in rows:
        cells = [
            {"text": text, "is_best": best.get(name) == getattr(row, name)}
            for name, text in zip(TABLE, format_row(row), strict=True)
        ]
        shown.append({"name": row.name.replace("_", " "), "cells": cells})
    return shown


def _sampled(limit: int, num_samples: int, of_which: str) -> str:
    if num_samples <= limit:
        return f"all {num_samples:,} samples of {of_which}"
    return f"{limit:,} random samples of the {num_samples:,} of {of_which}"


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _redacted(value: Any) -> Any:  # noqa: ANN401
    """The configuration with users, passwords and queries removed from URLs."""
    if isinstance(value, dict):
        return {name: _redacted(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_redacted(part) for part in value]
    return redact(value) if isinstance(value, str) else value
