"""A sentence-transformers model that turns texts into vectors: from a folder or the Hugging Face hub, on CPU or GPU.

Nothing that a model brings along is executed: only configurations, tokenizers and safetensors are fetched and loaded.

Shape suffixes: N texts, D features.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from datamask_pl.errors import ConfigError, DataFileError

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "float16", "bfloat16"]

_DATA_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
_HASH_BYTES = 1 << 20
_INSTALL = "pip install 'datamask_pl[sentence-transformers]'"


class TextModel:
    """A model that is ready to encode.

    Args:
        name: folder of a sentence-transformers or transformers model, or its name on the hub.
        prefix: text that is put before every text; by default as in the model's own configuration.
        max_length: tokens of a text that are read, the rest is cut off; by default all that the model can read.
        batch_size: texts that go through the model at once.
        device: `auto` is the GPU if there is one.
        precision: numbers that the model computes in; `auto` is float32 on a CPU, and on a GPU bfloat16 for a model
            that is stored in it, else float16.
        local_rank: which of the machine's GPUs.

    Raises:
        ConfigError: If the packages or the model are missing, its weights are not safetensors, it needs code of its
            own, or an option cannot be honoured.
        DataFileError: If a file of the model cannot be read.

    Attributes:
        num_dimensions: D.
        precision: what is computed in.
        device: on what.
        hash: SHA-256 of the model's files.
    """

    def __init__(
        self,
        *,
        name: str,
        prefix: str | None,
        max_length: int | None,
        batch_size: int,
        device: Device,
        precision: Precision,
        local_rank: int = 0,
    ) -> None:
        folder = find_model(name)
        _check_safetensors(folder, name)
        self.hash = hash_model(folder)
        self.device = _choose_device(device, local_rank)
        self.precision = _choose_precision(precision, folder, self.device)
        self._prefix = prefix
        self._batch_size = batch_size
        self._model = _load(folder, name, device=self.device, precision=self.precision)
        longest: int | None = self._model.max_seq_length
        if max_length is not None:
            if longest is not None and max_length > longest:
                raise ConfigError(
                    f"max_length must be at most {longest}, the tokens that {name} reads, got {max_length}."
                )
            self._model.max_seq_length = max_length
        self.num_dimensions = self.encode(["one text"]).shape[1]

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """The vectors of some texts, in their order, normalised or not as the model does.

        Texts of like length go through the model together, which is quicker; their order in the result is unchanged.

        Args:
            texts: N texts.

        Returns:
            float32 (N, D).

        Raises:
            ConfigError: If the GPU's memory is too small for a batch.
        """
        import torch

        try:
            vectors_ND = self._model.encode(
                list(texts),
                prompt=self._prefix,
                batch_size=self._batch_size,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"batch_size {self._batch_size} does not fit into the memory of {self.device}; lower it, or max_length."
            ) from error
        return np.asarray(vectors_ND, dtype=np.float32)


def find_model(name: str) -> Path:
    """The folder of a model; one of the hub is fetched, or found where it was fetched to before.

    Of the hub's files only those that hold data are fetched: configurations, tokenizers and safetensors.

    Raises:
        ConfigError: If there is no such folder and no such model, or the hub cannot be reached.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise ConfigError(f"model {name} is not a model's folder: it has neither modules.json nor config.json.")
        return folder
    if name.startswith((".", "~", os.sep)) or name.count("/") != 1 or folder.exists():
        raise ConfigError(
            f"model {name!r} is neither a folder on this machine nor a name such as intfloat/e5-base-v2; "
            "give one of them."
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(f"model {name} is to come from the hub, which needs huggingface-hub; {_INSTALL}.") from error
    try:
        return Path(snapshot_download(name, allow_patterns=[f"*{suffix}" for suffix in _DATA_SUFFIXES]))
    except (OSError, ValueError) as error:
        # Their own texts are long, and may quote addresses.
        raise ConfigError(
            f"model {name!r} is not a folder here, and the Hugging Face hub did not give it ({type(error).__name__}); "
            "check the name, the network and, for a model that is not public, HF_TOKEN; or pass the model's folder."
        ) from error


def hash_model(folder: Path) -> str:
    """SHA-256 over names and contents of the files that make a model's vectors.

    Raises:
        DataFileError: If one of them cannot be read.
    """
    digest = hashlib.sha256()
    for path in _data_files(folder):
        digest.update(path.relative_to(folder).as_posix().encode())
        try:
            with path.open("rb") as file:
                while chunk := file.read(_HASH_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise DataFileError(f"{path} cannot be read: {error.strerror or error}; copy the model again.") from error
    return digest.hexdigest()


def _data_files(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.suffix in _DATA_SUFFIXES and path.is_file()]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _check_safetensors(folder: Path, name: str) -> None:
    """Refuses weights in pickle's format, of which loading can execute anything."""
    for place in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
        has_pickle = any(place.glob("pytorch_model*.bin"))
        if has_pickle and not any(place.glob("*.safetensors")):
            raise ConfigError(
                f"model {name}: {place} holds its weights as pytorch_model.bin alone, which can execute code when it "
                "is loaded; where you trust it, SentenceTransformer(...).save_pretrained(...) makes safetensors of it."
            )
    if not any(path.suffix == ".safetensors" for path in _data_files(folder)):
        raise ConfigError(f"model {name} has no weights in safetensors in {folder}; pass a model that has.")


def _choose_device(device: Device, local_rank: int) -> str:
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("device: cuda needs a GPU that torch can use, there is none; set device: auto or cpu.")
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def _choose_precision(precision: Precision, folder: Path, device: str) -> str:
    if device == "cpu":
        if precision in ("float16", "bfloat16"):
            raise ConfigError(f"precision: {precision} is for GPUs, on a CPU it is slower; set precision: auto.")
        return "float32"
    if precision != "auto":
        return precision
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the module folder of an older layout; float16 suits those
        config = {}
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float16"


def _load(folder: Path, name: str, *, device: str, precision: str) -> Any:  # noqa: ANN401
    try:
        with warnings.catch_warnings():
            # what importing these packages says of their own dependencies is not for our users
            warnings.simplefilter("ignore", DeprecationWarning)
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise ConfigError(f"model {name} needs sentence-transformers ({error}); {_INSTALL}.") from error
    transformers_logging.disable_progress_bar()
    try:
        return SentenceTransformer(
            os.fspath(folder),
            device=device,
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True, "dtype": precision},
        )
    except Exception as error:  # whatever a broken configuration makes these packages raise
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model {name} cannot be loaded ({type(error).__name__}: {reason}); it has to be one that "
            "sentence-transformers loads without code of the model's own (trust_remote_code is never set)."
        ) from error
