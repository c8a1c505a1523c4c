"""Objects: plain state comes back equal, and nothing that would run is ever loaded."""

from __future__ import annotations

import collections
import datetime
import io
import os
import pickle
import random
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from lightning_dist.checkpoint import objects
from lightning_dist.checkpoint.objects import decode, encode
from lightning_dist.checkpoint.sharded import load, save
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import CheckpointError, UntrustedObjectError


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Evaluated:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1+1",)


class Settings:
    def __init__(self) -> None:
        self.x = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"epoch": 3, "best": 0.5, "names": ["a", ("b", 2)], "flag": True, "bytes": b"x"},
        collections.OrderedDict(a=1),
        {1, 2},
        Path("a/b"),
        PurePosixPath("/c"),
        datetime.timedelta(hours=1),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        np.float64(1.5),
        np.int32(7),
        np.bool_(True),
        random.Random(3).getstate(),
        torch.float32,
        torch.device("cpu"),
        torch.Size([1, 2]),
        complex(1, 2),
        1 << 100,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_state_comes_back_equal(value: object) -> None:
    back = decode(encode(value, "o").data, "o")
    assert back == value
    assert type(back) is type(value)


def test_random_generators_come_back() -> None:
    numpy_state = np.random.default_rng(3).bit_generator.state
    legacy = np.random.RandomState(3).get_state()
    back = decode(encode({"torch": torch.get_rng_state(), "numpy": numpy_state, "legacy": legacy}, "rng").data, "rng")
    assert torch.equal(back["torch"], torch.get_rng_state())
    assert back["numpy"] == numpy_state
    assert back["legacy"][0] == legacy[0]
    assert np.array_equal(back["legacy"][1], legacy[1])


def test_configurations_come_back() -> None:
    config = OmegaConf.create({"a": 1, "b": {"c": [1, 2.5, None, "x"]}, "path": Path("a"), "ref": "${a}", "flag": True})
    back = decode(encode(config, "config").data, "config")
    assert isinstance(back, DictConfig)
    assert back == config
    assert back.ref == 1


def test_what_could_not_be_read_back_is_refused_when_saved() -> None:
    with pytest.raises(CheckpointError, match=r"object 'hparams' holds .*test_objects\.Settings, which cannot be read"):
        encode({"s": Settings()}, "hparams")
    with pytest.raises(CheckpointError, match=r"'d' cannot be saved, .* lists, but got .*deque"):
        encode(collections.deque([1]), "d", allow=[collections.deque])
    with pytest.raises(CheckpointError, match="object 'f' cannot be saved"):
        encode(lambda: 1, "f")
    data = encode({"s": Settings()}, "hparams", allow=[Settings]).data
    assert decode(data, "hparams", allow=[Settings])["s"].x == 1
    with pytest.raises(UntrustedObjectError, match=r"'hparams' would load .*test_objects\.Settings"):
        decode(data, "hparams")


@pytest.mark.parametrize("form", ["torch", "legacy", "pickle"])
def test_an_exploit_is_refused_by_the_name_of_what_it_would_run(tmp_path: Path, form: str) -> None:
    buffer = io.BytesIO()
    exploit = {"innocent": 1, "payload": Exploit(tmp_path / "ran")}
    if form == "pickle":
        buffer.write(pickle.dumps(exploit))
    else:
        torch.save(exploit, buffer, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(UntrustedObjectError, match=r"object 'loops' would load (posix|os)\.system and is refused"):
        decode(buffer.getvalue(), "loops")
    assert not (tmp_path / "ran").exists()
    for wrong in (Evaluated(), {"x": np.load}):
        torch.save(wrong, buffer := io.BytesIO())
        with pytest.raises(UntrustedObjectError, match=r"would load (eval|builtins\.eval|numpy\.load|numpy\.lib)"):
            decode(buffer.getvalue(), "loops")


def test_an_exploit_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """Somebody made a checkpoint whose checksums are right."""
    from lightning_dist.checkpoint.objects import Encoded

    torch.save(Exploit(tmp_path / "ran"), buffer := io.BytesIO())
    folder = open_folder(tmp_path / "c")
    save({"loops": Encoded(buffer.getvalue())}, folder, rank=0, host="h")
    with pytest.raises(UntrustedObjectError, match=r"object 'loops' would load (posix|os)\.system"):
        load({"loops": None}, folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04", bytes(range(100))])
def test_what_is_no_object_is_an_error(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="object 'o' "):
        decode(data, "o")


def test_what_is_known_is_not_looked_at_again_and_what_is_new_is() -> None:
    known: set[tuple[bytes, bytes]] = set()
    encode({"a": np.arange(3)}, "x", reads_back=False, known=known)
    assert (b"numpy", b"dtype") in known
    with patch.object(objects, "_unsafe_names", side_effect=AssertionError):
        encode({"a": np.arange(4), "b": [1, 2]}, "x", reads_back=False, known=known)
    with pytest.raises(CheckpointError, match="Popen"):
        encode({"a": np.arange(3), "b": subprocess.Popen}, "x", reads_back=False, known=known)
