"""What the template is asked for: one process. It travels as JSON in an unnamed file: environments can be long."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lightning_dist.elastic.agent.command import Kind, Program


@dataclass(frozen=True)
class Start:
    """A process to start.

    Attributes:
        key: What the agent calls it.
        program: What it runs.
        environment: All its variables.
        folder: Where it works.
    """

    key: int
    program: Program
    environment: Mapping[str, str]
    folder: str

    def to_file(self) -> int:
        """A descriptor of an unnamed file that says this; to be closed by the caller."""
        descriptor = os.memfd_create("start", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(json.dumps(asdict(self)).encode())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def from_file(cls, descriptor: int) -> Start:
        """What :meth:`to_file` wrote; closes the descriptor."""
        with open(descriptor, "rb") as file:
            file.seek(0)
            value = json.loads(file.read())
        program = value.pop("program")
        arguments = tuple(program["arguments"])
        return cls(program=Program(Kind(program["kind"]), program["target"], arguments), **value)
