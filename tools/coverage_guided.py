"""Inputs that libFuzzer makes, guided by the branches that they take in our readers and in what parses for them.

    PYTHONPATH=. python tools/coverage_guided.py manifest -max_total_time=60

The first argument is one of READERS, the rest are libFuzzer's. Needs atheris. Whatever the bytes, errors of ours alone
may come of them. An input of which something else comes is left in the current folder; its path, in place of options,
runs it again.
"""

import io
import json
import os
import struct
import sys
import tempfile
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import atheris

READ_BY = ["datamask_pl.mask_", "datamask_pl.data.f", "datamask_pl.commands.apply", "datamask_pl.checkpoint_io"]
READ_BY += ["datamask_pl.evidence.c", "datamask_pl.fit", "datamask_pl.block_state", "datamask_pl.settings"]
# What parses for some of them; instrumenting takes a minute.
PARSERS = {"config": ["yaml", "jsonargparse"], "checkpoint": ["torch._weights_only_unpickler"]}
with atheris.instrument_imports(include=READ_BY + PARSERS.get(" ".join(sys.argv[1:2]), [])):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    import yaml
    from jsonargparse import ArgumentError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    import datamask_pl.fit
    from datamask_pl import checkpoint_io, mask_part
    from datamask_pl.block_state import read_dump
    from datamask_pl.commands.apply import RECORD_NAME, Target
    from datamask_pl.data.forced_ids import read_forced_ids
    from datamask_pl.data.sources import read_sources
    from datamask_pl.errors import DatamaskError
    from datamask_pl.evidence import comparison
    from datamask_pl.evidence.curves import read_scalars
    from datamask_pl.mask_file import MANIFEST_NAME, Manifest, part_name, read_complete

FOLDER = Path(tempfile.mkdtemp(prefix="datamask_pl-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
ABOUT = {"part": part_name(0), "num_samples": 3, "num_selected": 1, "num_dropped": 0}
MANIFEST = {"plan_hash": "0", "files": ["a"], "num_blocks": 1, "settings": {"a": 1}, "versions": {}, "config": None}
MANIFEST |= {"blocks": {"0": ABOUT}, "format": 1}
STATE = {"version": 1, "plan_hash": "0", "settings": {"model.num_steps": 9}}
DUMP = {"index": 0, "scales": torch.ones(2, dtype=torch.float64), "num_steps": 1, "seconds": 1.0, "best_mask": None}
DUMP |= {"best_reward": 0.5, "num_unchanged": 0, "is_settled": False}


def read_manifest(content: bytes) -> None:
    """The bytes are a manifest."""
    (FOLDER / MANIFEST_NAME).write_bytes(content)
    Manifest.read(FOLDER)


def read_part_metadata(content: bytes) -> None:
    """The bytes are what a part says of its block, with the right checksum."""
    (FOLDER / MANIFEST_NAME).write_text(json.dumps(MANIFEST))
    table = pa.table({"id": [1, 2, 3]}).replace_schema_metadata(
        {mask_part._METADATA_KEY: content, mask_part._SUM_KEY: mask_part._sum_of(content)}
    )
    pq.write_table(table, FOLDER / part_name(0))
    read_complete(FOLDER)


def read_comparison(content: bytes) -> None:
    """The bytes are a comparison, with the right checksum."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        parsed = json.loads(content)
        parsed.pop("sha256", None)
        content = json.dumps({**parsed, "sha256": comparison._sum_of(parsed)}).encode()
    (FOLDER / "comparison.json").write_bytes(content)
    for block in comparison.Comparison.read(FOLDER / "comparison.json").blocks:
        for row in block.rows:
            comparison.format_row(row)


def read_record(content: bytes) -> None:
    """The bytes are apply's record."""
    output = FOLDER / "output"
    output.mkdir(exist_ok=True)
    source = FOLDER / "source.parquet"
    if not source.exists():
        pq.write_table(pa.table({"chunk_id": [1, 2, 3]}), source)
    (output / RECORD_NAME).write_bytes(content)
    Target.open("output", output, read_sources(str(source), "chunk_id"), [np.array([True, False, False])])


def read_ids(content: bytes) -> None:
    """The first byte chooses a type, the others are a file of ids."""
    kinds = [pa.int64(), pa.string(), pa.binary(), pa.timestamp("us"), pa.decimal128(9, 2), pa.float64(), pa.bool_()]
    (FOLDER / "ids").write_bytes(content[1:])
    kind = kinds[content[0] % len(kinds)] if content else kinds[0]
    read_forced_ids(str(FOLDER / "ids"), None, id_column="chunk_id", id_type=kind)


def read_events(content: bytes) -> None:
    """The bytes are an event, with the right checksums."""
    length = struct.pack("<Q", len(content))
    parts = (length, struct.pack("<I", masked_crc32c(length)), content, struct.pack("<I", masked_crc32c(content)))
    (FOLDER / "events.out.tfevents.0").write_bytes(b"".join(parts))
    read_scalars(FOLDER)


def read_checkpoint(content: bytes) -> None:
    """The bytes are the pickle in a checkpoint, with the right checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", b"little")
        for index in range(2):
            archive.writestr(f"archive/data/{index}", bytes(16))
        archive.writestr("archive/version", b"3\n")
    body = memoryview(buffer.getvalue())[:-2]
    (FOLDER / "x.ckpt").write_bytes(bytes(body) + checkpoint_io._ending(body))
    found = checkpoint_io.read_checkpoint(FOLDER / "x.ckpt")
    made_with = {"version": 1, "plan_hash": "0", "model.num_steps": 9}
    read_dump(found, made_with=made_with, index=0, num_samples=3, num_terms=2)


class _Parser(Exception):  # noqa: N818
    pass


def _fit_parser() -> object:
    """The parser of `fit`, before anything has been parsed."""

    class Stops(datamask_pl.fit.FitCLI):
        def parse_arguments(self, parser: object, args: object) -> NoReturn:
            raise _Parser(parser)

    before, datamask_pl.fit.FitCLI = datamask_pl.fit.FitCLI, Stops
    try:
        datamask_pl.fit.run_fit([])
    except _Parser as caught:
        return caught.args[0]
    finally:
        datamask_pl.fit.FitCLI = before
    raise AssertionError


def read_config(content: bytes) -> None:
    """The bytes are a config."""
    with suppress(yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
        # a mapping that contains itself sends jsonargparse into an endless loop, which is known
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(content.decode())):
            return
    (FOLDER / "config.yaml").write_bytes(content)
    # of these errors the command line makes one line
    with suppress(ArgumentError, UnicodeDecodeError):
        PARSER.parse_args(["fit", "--config", str(FOLDER / "config.yaml"), "--data.path", "x"])


def _pickled() -> bytes:
    buffer = io.BytesIO()
    content = {"datamask_pl": {**STATE, "block": DUMP}, "state_dict": {"policy.logits": torch.zeros(3)}}
    torch.save(content, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


ROW = {"block": 0, "name": "mask", **dict.fromkeys(comparison.TABLE, 0.5)}
BLOCK = {"index": 0, "num_samples": 3, "num_selected": 1, "formula": "f", "notes": ["n"], "rows": [ROW]}
COMPARISON = {"format": comparison.COMPARISON_FORMAT, "plan_hash": "0", "settings": {}, "near_duplicate": 0.9}
COMPARISON |= {"seed": 0, "num_threads": 1, "blocks": [BLOCK]}
FOOTER = {"format": 1, "plan_hash": "0", "settings": {"a": 1}, "about": ABOUT}
CONFIG = b"data: {path: x, block_size: 9}\nmodel: {diversity: [{objective: disf, weight: 2.0}]}\nckpt_path: x\n"
# Each with an input to begin with.
READERS = {
    "manifest": (read_manifest, json.dumps(MANIFEST).encode()),
    "part": (read_part_metadata, json.dumps(FOOTER).encode()),
    "comparison": (read_comparison, json.dumps(COMPARISON).encode()),
    "record": (read_record, b'{"format": 1, "selection": "0", "files": {"source.parquet": {"num_bytes": 9}}}'),
    "ids": (read_ids, b"\0001\n22\r\n-3\n"),
    "events": (read_events, b"\x09\0\0\0\0\0\0\xf0\x3f\x10\x01\x2a\x08\x0a\x06\x0a\x01f\x15\0\0\0\x3f"),
    "checkpoint": (read_checkpoint, _pickled()),
    "config": (read_config, CONFIG),
}


def main() -> None:
    """Runs one reader until libFuzzer has had enough."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in READERS:
        sys.exit(f"give one of {', '.join(READERS)}, then options of libFuzzer")
    read, seed = READERS[name]
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    (corpus / "seed").write_bytes(seed)

    def test_one_input(content: bytes) -> None:
        with warnings.catch_warnings(), suppress(DatamaskError):
            warnings.simplefilter("ignore")
            read(content)

    given = sys.argv[1:]
    is_again = any(not option.startswith("-") for option in given)
    options = given if is_again else [str(corpus), "-rss_limit_mb=6000", "-timeout=300", *given]
    atheris.Setup([sys.argv[0], *options], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    PARSER = _fit_parser() if "config" in sys.argv[1:2] else None
    main()
