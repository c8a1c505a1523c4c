"""Sharded checkpoints where Lightning expects a file: under its own strategies, and where a model is loaded alone."""

from __future__ import annotations

import io
import os
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO

from lightning_dist.modes import checkpoints, whole_checkpoints

_Module = TypeVar("_Module", bound=pl.LightningModule)


class FolderCheckpointIO(CheckpointIO):
    """Reads and removes sharded checkpoints, and leaves the rest to another.

    Args:
        files: What reads, writes and removes files.
    """

    def __init__(self, files: CheckpointIO) -> None:
        self._files = files

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a file."""
        self._files.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, or all of a sharded checkpoint, into CPU memory."""
        folder = checkpoints.without_marker(os.fspath(path))
        if checkpoints.is_sharded(folder):
            return whole_checkpoints.load_whole(folder)
        return self._files.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove either."""
        if checkpoints.is_sharded(os.fspath(path)):
            checkpoints.remove(os.fspath(path))
        else:
            self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        """The other's."""
        self._files.teardown()


def load_from_checkpoint(kind: type[_Module], path: str | os.PathLike[str], **arguments: Any) -> _Module:
    """``kind.load_from_checkpoint`` of a sharded checkpoint.

    Args:
        kind: The module's class.
        path: Folder or URL.
        **arguments: Of :meth:`~lightning.pytorch.LightningModule.load_from_checkpoint`.
    """
    file = io.BytesIO()
    torch.save(whole_checkpoints.load_whole(os.fspath(path), weights_only=True), file)
    file.seek(0)
    return kind.load_from_checkpoint(file, **arguments)
