"""From shards in an S3 bucket through fit and apply back to the bucket, on a server of this machine's."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.cli import main
from tests.support.fits import QUIET, ROOT, fit, parts, run_folder, selected_ids, write_shards

SECRET = "a-very-secret-key"
BUCKET = "s3://bucket"


@pytest.fixture(scope="module")
def server():
    """The address of an S3 server in a process of its own."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto, flask and flask-cors are not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(server, workplace, monkeypatch):
    """An empty bucket; credentials and address come by the variables that the AWS tools read."""
    variables = {
        "AWS_ACCESS_KEY_ID": "an-id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST"), timeout=300).close()
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    fsspec.filesystem("s3").clear_instance_cache()
    filesystem.mkdir("bucket")
    return filesystem


def files_of(bucket, folder):
    bucket.invalidate_cache()
    return sorted(path.removeprefix(f"{folder}/") for path in bucket.find(folder))


def test_fit_and_apply_read_and_write_a_bucket_as_they_do_folders(bucket, workplace, capsys):
    write_shards("shards", [90, 60])
    for path in Path("shards").iterdir():
        bucket.put_file(str(path), f"bucket/shards/{path.name}")
    options = ("--data.block_size", "60", "--model.select_ratio", "0.2", "--model.num_steps", "4")
    fit("--data.path", "shards", *options, "--mask.output", "mask")
    fit("--data.path", f"{BUCKET}/shards/*.parquet", *options, "--mask.output", f"{BUCKET}/mask", "--run_name", "far")
    assert files_of(bucket, "bucket/mask") == files_of(fsspec.filesystem("file"), str(Path("mask").resolve()))
    far = [pq.read_table(f"bucket/mask/part-{block:05d}.parquet", filesystem=bucket) for block in range(3)]
    assert selected_ids(far) == selected_ids(parts("mask"))
    for source, output in (("shards", f"{BUCKET}/kept"), (f"{BUCKET}/shards", f"{BUCKET}/kept-2"), (BUCKET, "kept")):
        source = f"{BUCKET}/shards" if source == BUCKET else source
        main(["apply", "--mask", f"{BUCKET}/mask", "--source", source, "--output", output])
    names = ["_apply.json", "shard-0.parquet", "shard-1.parquet"]
    assert files_of(bucket, "bucket/kept") == files_of(bucket, "bucket/kept-2") == sorted(os.listdir("kept")) == names
    kept = [pq.read_table(f"bucket/kept/{name}", filesystem=bucket) for name in names[1:]]
    wanted = sorted(id_ for ids in selected_ids(far) for id_ in ids)
    assert pa.concat_tables(kept)["chunk_id"].to_pylist() == wanted
    for name, table in zip(names[1:], kept, strict=True):
        assert pq.read_table(f"kept/{name}").equals(table)
    capsys.readouterr()
    # a second time there is nothing to do; what is missing is written again
    main(["apply", "--mask", f"{BUCKET}/mask", "--source", "shards", "--output", f"{BUCKET}/kept"])
    assert "nothing was left to do" in capsys.readouterr().out
    bucket.rm("bucket/kept/shard-1.parquet")
    main(["apply", "--mask", f"{BUCKET}/mask", "--source", "shards", "--output", f"{BUCKET}/kept"])
    assert files_of(bucket, "bucket/kept") == names


def test_a_mask_in_a_bucket_is_gone_on_with(bucket, workplace, capsys):
    write_shards("shards", [90, 60])
    options = ("--data.path", "shards", "--data.block_size", "60", "--model.num_steps", "4")
    fit(*options, "--mask.output", "whole")
    command = (*options, "--mask.output", f"{BUCKET}/mask", "--run_name", "far")
    fit(*command, "--trainer.max_steps", "5")
    assert files_of(bucket, "bucket/mask") == ["_manifest.json", "part-00000.parquet"]
    capsys.readouterr()
    fit(*command)
    assert "2 blocks after 1 finished before" in capsys.readouterr().out
    bucket.invalidate_cache()
    far = [pq.read_table(f"bucket/mask/part-{block:05d}.parquet", filesystem=bucket) for block in range(3)]
    assert [table["logit"].to_pylist() for table in far] == [table["logit"].to_pylist() for table in parts("whole")]


def test_no_secret_is_in_what_is_written_or_printed(bucket, workplace, capfd):
    write_shards("shards", [60])
    bucket.put_file("shards/shard-0.parquet", "bucket/shards/a.parquet")
    fit("--data.path", f"{BUCKET}/shards", "--model.num_steps", "2", "--mask.output", f"{BUCKET}/mask")
    main(["apply", "--mask", f"{BUCKET}/mask", "--source", f"{BUCKET}/shards", "--output", f"{BUCKET}/kept"])
    here = [path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()]
    there = [bucket.cat_file(path) for path in bucket.find("bucket")]
    assert len(here) >= 2
    assert len(there) >= 5
    manifest = json.loads(bucket.cat_file("bucket/mask/_manifest.json"))
    assert manifest["config"]["data"]["path"] == f"{BUCKET}/shards"
    for content in (*here, *there, "".join(capfd.readouterr()).encode()):
        assert SECRET.encode() not in content
        assert b"an-id" not in content


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (("--data.path", f"s3://key:{SECRET}@bucket/shards"), "data.path: s3://bucket/shards was given with a user"),
        (("--data.path", "shards", "--mask.output", f"s3://bucket/m?token={SECRET}"), "mask.output: s3://bucket/m was"),
        (("--data.path", "shards", "--trainer.logger.save_dir", f"{BUCKET}/runs"), "save_dir must be a path on this"),
        (
            ("--data.path", "shards", "--trainer.logger", "false", "--trainer.default_root_dir", f"{BUCKET}/runs"),
            "root_dir must be a path on this",
        ),
        (("--data.path", "shards", "--ckpt_path", f"{BUCKET}/runs/a.ckpt"), "--ckpt_path must be a path on this"),
        (
            ("--data.path", "shards", "--mask.output", "sftp://host/mask"),
            "mask.output must be a path on this machine",
        ),
    ],
    ids=["user", "query", "logger", "root", "checkpoint", "sftp"],
)
def test_what_may_not_be_remote_is_refused_before_anything_is_written(workplace, capsys, options, needed):
    write_shards("shards", [60])
    with pytest.raises(SystemExit) as ended:
        fit(*options)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert needed in line
    assert line.count("\n") == 1
    assert SECRET not in line
    assert os.listdir() == ["shards"]
    assert not run_folder().exists()


@pytest.fixture
def hub(workplace):
    """A server of this machine that answers as the Hugging Face hub does, for the files of the folder `hub`."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    root = Path("hub").resolve()

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, content, code=200, **headers):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(code)
            for name, value in {"Content-Length": len(body), "X-Repo-Commit": "c" * 40, **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def about(self, path):
            kind = {"type": "directory"} if path.is_dir() else {"type": "file", "size": path.stat().st_size}
            return {**kind, "oid": "0" * 40, "path": path.relative_to(root).as_posix()}

        def do_GET(self):
            path = unquote(self.path.partition("?")[0])
            if found := re.fullmatch(r"/api/datasets/me/texts/tree/[^/]+/?(.*)", path):
                here = root / found[1]
                return self.answer([self.about(item) for item in sorted(here.iterdir())] if here.is_dir() else [])
            if re.fullmatch(r"/api/datasets/me/texts(/revision/.*)?", path):
                return self.answer({"id": "me/texts", "sha": "c" * 40, "siblings": []})
            if found := re.fullmatch(r"/datasets/me/texts/resolve/[^/]+/(.*)", path):
                content = (root / found[1]).read_bytes()
                if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    first, last = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
                    where = f"bytes {first}-{last}/{len(content)}"
                    return self.answer(content[first : last + 1], 206, Content_Range=where, ETag='"e"')
                return self.answer(content, ETag='"e"')
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

        def do_POST(self):
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            try:
                paths = json.loads(asked)["paths"]
            except ValueError:
                paths = parse_qs(asked)["paths"]
            self.answer([self.about(root / path) for path in paths if path and (root / path).exists()])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def on_the_hub(hub, *args):
    """A command in a process of its own, for the hub's address is read when its package is imported."""
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(Path("home").resolve()), "PYTHONPATH": str(ROOT)}
    env = {name: value for name, value in env.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    command = [sys.executable, str(ROOT / "cli.py"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_shards_are_read_from_the_hub(hub, workplace):
    write_shards("hub/data", [90, 60])
    options = ("--data.block_size", "100", "--model.num_steps", "2", *QUIET)
    fit("--data.path", "hub/data", *options, "--mask.output", "mask")
    files = "hf://datasets/me/texts/data/*.parquet"
    done = on_the_hub(hub, "fit", "--data.path", files, *options, "--mask.output", "far", "--trainer.logger", "false")
    assert done.returncode == 0, done.stderr
    assert selected_ids(parts("far")) == selected_ids(parts("mask"))
    done = on_the_hub(hub, "apply", "--mask", "mask", "--source", files, "--output", "kept")
    assert done.returncode == 0, done.stderr
    assert pq.read_table("kept")["chunk_id"].to_pylist() == [id_ for ids in selected_ids(parts("mask")) for id_ in ids]
    done = on_the_hub(hub, "apply", "--mask", "mask", "--source", "hf://datasets/me/none/*.parquet", "--output", "no")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "hf://datasets/me/none/*.parquet" in done.stderr
    assert not Path("no").exists()


@pytest.mark.parametrize(("url", "package"), [("gs://bucket/a.parquet", "gcsfs"), ("hf://datasets/a/b", "huggingface")])
def test_a_store_whose_package_is_missing_is_named_with_what_to_install(workplace, capsys, monkeypatch, url, package):
    for name in ("gcsfs", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    with pytest.raises(SystemExit) as ended:
        fit("--data.path", url)
    assert ended.value.code == 2
    extra = url.partition(":")[0]
    assert re.search(rf"it needs {package}[\w-]*; pip install 'datamask_pl\[{extra}\]'", capsys.readouterr().err)


def test_a_bucket_that_is_not_there_is_one_line(bucket, workplace, capsys):
    write_shards("shards", [60])
    for options, needed in (
        (("--data.path", "s3://nowhere/*.parquet"), "nothing matches 's3://nowhere/*.parquet'"),
        (
            ("--data.path", "shards", "--mask.output", "s3://nowhere/mask"),
            "mask/_manifest.json cannot be written",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            fit(*options)
        assert ended.value.code == 2
        line = capsys.readouterr().err
        assert needed in line
        assert line.count("\n") == 1
