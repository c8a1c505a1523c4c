"""Where activations are split over the ranks, and which random numbers are drawn there.

Between the output of a column layer and the input of a row layer each rank holds other features (its own heads), so
dropout there must draw other masks on each rank. Everywhere else all ranks of the group hold the same activations and
must draw the same masks. The ranks' default generators are therefore kept alike, and a rank's own stream takes their
place between a column layer and a row layer.

Note: the own stream is a function of the shared one.
    Recomputation (``torch.utils.checkpoint``) puts the default generator back to where it was when the segment ran, and
    runs it again; it knows nothing of ours. So the own stream starts from what the shared one is at the time, and
    after it the shared one goes on from a state that depends on that start only. A recomputed segment may also end in
    the middle (it stops early, by an exception) and leave the own stream; then the generator has been put back by
    others, which is seen by its seed.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch

from lightning_dist.errors import ConfigError


class RandomStream(Protocol):
    """A rank's own random numbers in place of the shared ones."""

    def switch(self) -> None:
        """From the shared to the own stream."""

    def restore(self) -> None:
        """Back to the shared stream, which has advanced if numbers were drawn; alike on all ranks."""

    @property
    def is_current(self) -> bool:
        """Whether the default generator is (still) this rank's own."""


class HostStream:
    """On CPU: a Mersenne twister, whose state is all there is. It is seeded by a hash of the shared state.

    Args:
        index: This rank's position in the group.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._generator = torch.default_generator
        self._seed: int | None = None
        self._shared = self._start = torch.empty(0, dtype=torch.uint8)

    def switch(self) -> None:
        """From the shared to the own stream."""
        self._shared = self._generator.get_state()
        self._seed = _derived_seed(self._shared.numpy().tobytes(), self._index)
        self._generator.manual_seed(self._seed)
        self._start = self._generator.get_state()

    def restore(self) -> None:
        """Back to the shared stream, advanced by one draw if the own one was used: the next start must be another."""
        was_used = not torch.equal(self._generator.get_state(), self._start)
        self._generator.set_state(self._shared)
        self._seed = None
        if was_used:
            torch.empty(1).uniform_(generator=self._generator)

    @property
    def is_current(self) -> bool:
        """Whether the default generator is (still) this rank's own."""
        return self._seed is not None and self._generator.initial_seed() == self._seed


class DeviceStream:
    """On CUDA: Philox, a seed and an offset. The own stream has another seed; the offset goes on through both.

    Args:
        index: This rank's position in the group.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self._shared_seed = 0
        self._seed: int | None = None

    def switch(self) -> None:
        """From the shared to the own stream."""
        self._shared_seed = self._generator.initial_seed()
        self._seed = _derived_seed(self._shared_seed.to_bytes(8, "little", signed=self._shared_seed < 0), self._index)
        self._reseed(self._seed)

    def restore(self) -> None:
        """Back to the shared stream."""
        self._seed = None
        self._reseed(self._shared_seed)

    @property
    def is_current(self) -> bool:
        """Whether the default generator is (still) this rank's own."""
        return self._seed is not None and self._generator.initial_seed() == self._seed

    def _reseed(self, seed: int) -> None:
        offset = self._generator.get_offset()
        self._generator.manual_seed(seed)
        self._generator.set_offset(offset)


class SplitRegion:
    """Between a column layer and its row layer: knows whether a rank is there, and switches its random numbers.

    Args:
        stream: This rank's own random numbers.
    """

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream
        self._is_random = False
        self.opened_by: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether activations are split now."""
        return self.opened_by is not None and (not self._is_random or self._stream.is_current)

    def enter(self, path: str, *, is_random: bool) -> None:
        """After a column layer; layers side by side (query, key, value) enter once.

        Args:
            path: Of the layer.
            is_random: Whether random numbers may be drawn inside, i.e. the layer is in training mode.
        """
        if self.is_open and self._is_random == is_random:
            return
        self.leave()
        self.opened_by, self._is_random = path, is_random
        if is_random:
            self._stream.switch()

    def leave(self) -> str | None:
        """Before a row layer, or to clean up; the path that had entered, if the region was open."""
        was_open, path = self.is_open, self.opened_by
        self.opened_by = None
        if was_open and self._is_random:
            self._stream.restore()
        return path if was_open else None


def make_stream(device_type: str, index: int) -> RandomStream:
    """The own stream of the rank at ``index`` of its group."""
    if device_type == "cpu":
        return HostStream(index)
    if device_type == "cuda":
        return DeviceStream(index)
    raise ConfigError(f"tensor parallelism runs on cpu and cuda, got device type {device_type!r}")


def _derived_seed(shared: bytes, index: int) -> int:
    digest = hashlib.blake2b(shared, digest_size=8, salt=index.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") >> 1
