import zipfile

import pytest
import torch

from datamask_pl.callbacks.checkpoint import AtomicCheckpointIO
from datamask_pl.errors import CheckpointError, DataFileError
from datamask_pl.io.checkpoints import (
    STATE_KEY,
    checkpoint_name,
    encode,
    list_checkpoints,
    newest_whole_checkpoint,
    read_checkpoint,
)

CONTENT = {STATE_KEY: {"version": 1}, "logits": torch.arange(1000.0)}


def save(folder, block, step):
    path = folder / checkpoint_name(block, step)
    AtomicCheckpointIO().save_checkpoint(CONTENT, path)
    return path


def test_what_was_saved_is_read(tmp_path):
    path = save(tmp_path / "new", 0, 1)
    content = AtomicCheckpointIO().load_checkpoint(path)
    assert content[STATE_KEY] == {"version": 1}
    assert torch.equal(content["logits"], CONTENT["logits"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_checkpoints_are_listed_by_block_and_step_and_other_files_are_not(tmp_path):
    for block, step in [(10, 2), (2, 9), (2, 100000), (2, 1000000), (100000, 0)]:
        save(tmp_path, block, step)
    (tmp_path / "best.ckpt").touch()
    (tmp_path / ".block-00001-step-000001.ckpt.12-ab.tmp").touch()
    pairs = [path.stem.split("-")[1::2] for path in list_checkpoints(tmp_path)]
    assert [(int(block), int(step)) for block, step in pairs] == [
        (2, 9), (2, 100000), (2, 1000000), (10, 2), (100000, 0)
    ]  # fmt: skip
    assert [path.name for path in list_checkpoints(tmp_path, 10)] == ["block-00010-step-000002.ckpt"]
    assert list_checkpoints(tmp_path / "missing") == []


@pytest.mark.parametrize(
    "spoil",
    [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: b"text", lambda content: b"PK"],
    ids=["half", "empty", "text", "two bytes"],
)
def test_a_damaged_one_is_refused_and_passed_over(tmp_path, spoil):
    older, newer = save(tmp_path, 0, 1), save(tmp_path, 0, 2)
    newer.write_bytes(spoil(newer.read_bytes()))
    with pytest.raises(CheckpointError, match=r"step-000002\.ckpt is damaged"):
        read_checkpoint(newer)
    with pytest.warns(UserWarning, match="Falling back to the one before"):
        assert newest_whole_checkpoint(tmp_path, 0, below=9) == older


def test_a_bit_that_has_changed_is_noticed(tmp_path):
    """Wherever it is. Torch reads altered logits without a word."""
    path = save(tmp_path, 0, 1)
    whole = path.read_bytes()
    for position in [*range(0, len(whole), 29), *range(len(whole) - 600, len(whole))]:
        path.write_bytes(b"".join([whole[:position], bytes([whole[position] ^ 4]), whole[position + 1 :]]))
        with pytest.raises(CheckpointError, match="does not end with the checksum of its bytes"):
            read_checkpoint(path)


def test_a_bit_of_the_directory_that_torch_takes_for_an_empty_tensor_is_noticed(tmp_path):
    """Of an entry that is marked as a folder, torch 2.13 reads nothing, and returns memory that was never written."""
    path = save(tmp_path, 0, 1)
    whole = path.read_bytes()
    entry = whole.rindex(b"/data/0")
    header = whole.rindex(b"PK\x01\x02", 0, entry)
    attributes = header + 38
    path.write_bytes(b"".join([whole[:attributes], b"\x10", whole[attributes + 1 :]]))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with pytest.raises(CheckpointError, match="does not end with the checksum of its bytes"):
        read_checkpoint(path)


def test_others_read_it_as_any_checkpoint_of_torch(tmp_path):
    assert torch.equal(torch.load(save(tmp_path, 0, 1), weights_only=True)["logits"], CONTENT["logits"])


def test_where_none_is_whole_there_is_none(tmp_path):
    assert newest_whole_checkpoint(tmp_path / "missing", 0, below=9) is None
    save(tmp_path, 0, 1).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert newest_whole_checkpoint(tmp_path, 0, below=9) is None


def test_the_newest_is_that_of_the_block_and_not_of_its_last_step(tmp_path):
    newest = save(tmp_path, 3, 8)
    for block, step in ((3, 7), (3, 9), (2, 8), (4, 1)):
        save(tmp_path, block, step)
    assert newest_whole_checkpoint(tmp_path, 3, below=9) == newest
    assert newest_whole_checkpoint(tmp_path, 5, below=9) is None


@pytest.mark.parametrize("content", [[1], {"state_dict": {}}, {STATE_KEY: 1}], ids=str)
def test_one_that_is_not_ours_is_refused(tmp_path, content):
    (tmp_path / "other.ckpt").write_bytes(b"".join(encode(content)))
    with pytest.raises(CheckpointError, match=r"other\.ckpt was not written by datamask_pl"):
        read_checkpoint(tmp_path / "other.ckpt")


class Trap:
    """Unpickled, it would run."""

    def __reduce__(self):
        return (pytest.fail, ("code in a checkpoint was run",))


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "trap.ckpt").write_bytes(b"".join(encode({STATE_KEY: Trap()})))
    with pytest.raises(CheckpointError, match=r"damaged or was not written by datamask_pl \(Weights only load failed"):
        read_checkpoint(tmp_path / "trap.ckpt")


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    path = save(tmp_path, 0, 1)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataFileError, match="free some space"):
        AtomicCheckpointIO().save_checkpoint({**CONTENT, "more": 1}, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_one_is_removed_if_it_is_there(tmp_path):
    path = save(tmp_path, 0, 1)
    for _ in range(2):
        AtomicCheckpointIO().remove_checkpoint(path)
    assert not path.exists()
