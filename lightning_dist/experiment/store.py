"""The folder of an experiment: what was asked for, and of each run its curve, its output and how it ended.

::

    experiment.json            what was asked for; locked while a command works on it
    a-seed0/outcome.json       how the run ended; there only once it has
    a-seed0/output.log         what it printed
    a-seed0/curve/             what its ranks wrote down
    a-seed0/run/               its own outputs (hydra.run.dir)
    report.html, result.json   what all of them say together

A run without its outcome was cut short, and is run anew from the start; so is one that failed. Those that are done
are kept, so that the same command, given again, goes on.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning_dist.errors import ConfigError, RecordError
from lightning_dist.experiment.arms import Experiment, RunName, said

REPORT_FILE = "report.html"
RESULT_FILE = "result.json"
_EXPERIMENT_FILE = "experiment.json"
_OUTCOME_FILE = "outcome.json"
_CURVE_FOLDER = "curve"
_VERSION = 1


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        is_good: Whether it may be compared.
        why: What is wrong with it, a sentence; empty if nothing is.
        seconds: From its start to its end.
        last_words: The last lines that it printed, if something is wrong.
        taken_from: Folder of the experiment that it was run for; empty: this one.
    """

    is_good: bool
    why: str
    seconds: float
    last_words: tuple[str, ...] = ()
    taken_from: str = ""


def default_folder(experiment: Experiment) -> Path:
    """The same for the same experiment, so that the same command goes on."""
    text = json.dumps(dataclasses.asdict(experiment), sort_keys=True)
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.=-]+", "_", f"{said(experiment.a)}--{said(experiment.b)}").strip("_")[:60]
    return Path("outputs") / "ab" / f"{name}-{mark}"


class Store:
    """An experiment's folder, held by one command at a time.

    Args:
        folder: Made if it is not there.
        experiment: What is asked for; it must be what the folder holds already, if it holds one.

    Raises:
        ConfigError: The folder is another experiment's, or another command works on it.
        RecordError: It cannot be written, or what it holds cannot be read.
    """

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder = folder
        self._asked: dict[str, Any] = {"version": _VERSION, **json.loads(json.dumps(dataclasses.asdict(experiment)))}
        self._file: TextIO | None = None
        path = folder / _EXPERIMENT_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise RecordError(f"{folder} cannot be written: {error}; name another folder with --output") from error
        try:
            self._hold(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others work on it. Safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_folder(self, name: RunName) -> Path:
        """Where a run leaves what it leaves."""
        return self.folder / str(name)

    def curve_folder(self, name: RunName) -> Path:
        """Where a run's ranks write."""
        return self.run_folder(name) / _CURVE_FOLDER

    def output_file(self, name: RunName) -> Path:
        """What a run prints."""
        return self.run_folder(name) / "output.log"

    def outcome(self, name: RunName) -> Outcome | None:
        """How a run ended; ``None``: it has not, or left nothing that can be read."""
        return _outcome(self.run_folder(name))

    def take(self, names: Iterable[RunName], source: Path) -> list[RunName]:
        """Copy runs of the first arm from another experiment that differs in the second arm only.

        Args:
            names: Which, if they are good there, and not here.
            source: Folder of the other experiment.

        Returns:
            Those that were taken.

        Raises:
            ConfigError: The folder is no experiment, or one that differs in more.
            RecordError: The runs cannot be read or written.
        """
        try:
            there = json.loads((source / _EXPERIMENT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--a-from {source} is no folder of a hierdist ab: {error}") from error
        for key in self._asked.keys() - {"b"}:
            if there.get(key) != self._asked[key]:
                raise ConfigError(
                    f"--a-from {source} holds runs of another kind: {key} is {_shown(there.get(key))} there, and "
                    f"{_shown(self._asked[key])} here; runs are taken where only --b differs"
                )
        taken = []
        for name in names:
            known, here = _outcome(source / str(name)), self.outcome(name)
            if name.arm != "a" or known is None or not known.is_good or (here is not None and here.is_good):
                continue
            self.begin(name)
            try:
                shutil.copytree(source / str(name) / _CURVE_FOLDER, self.curve_folder(name), dirs_exist_ok=True)
            except OSError as error:
                raise RecordError(f"{source / str(name)} cannot be copied: {error}") from error
            self.end(name, dataclasses.replace(known, taken_from=str(source)))
            taken.append(name)
        return taken

    def begin(self, name: RunName) -> None:
        """Make room for a run: what an earlier attempt left goes."""
        folder = self.run_folder(name)
        if folder.exists():
            shutil.rmtree(folder)
        self.curve_folder(name).mkdir(parents=True)

    def end(self, name: RunName, outcome: Outcome) -> None:
        """Keep how a run ended; whole or not at all."""
        self._write(self.run_folder(name) / _OUTCOME_FILE, json.dumps(dataclasses.asdict(outcome), indent=1))

    def write(self, name: str, text: str) -> Path:
        """A file of the folder itself; whole or not at all."""
        return self._write(self.folder / name, text)

    def _write(self, path: Path, text: str) -> Path:
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            fresh.write_text(text + "\n", encoding="utf-8", errors="replace")
            fresh.replace(path)
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {error}") from error
        finally:
            fresh.unlink(missing_ok=True)
        return path

    def _hold(self, path: Path) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another hierdist ab works on {self.folder}; wait for it, or name another folder with --output"
            ) from error
        self._file.seek(0)
        text = self._file.read()
        if not text:
            if others := sorted(each.name for each in self.folder.iterdir() if each.name != _EXPERIMENT_FILE):
                path.unlink()
                raise ConfigError(
                    f"{self.folder} holds something else ({', '.join(others[:3])}); name a folder of its own with "
                    "--output"
                )
            json.dump(self._asked, self._file, indent=1)
            self._file.flush()
            return
        try:
            there: dict[str, Any] = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path} cannot be read: {error}; name another folder with --output") from error
        different = [key for key in self._asked if there.get(key) != self._asked[key]]
        if different:
            key = different[0]
            raise ConfigError(
                f"{self.folder} holds another experiment: {key} was {_shown(there.get(key))}, and is now "
                f"{_shown(self._asked[key])}; name another folder with --output"
            )


def _outcome(run: Path) -> Outcome | None:
    try:
        values = json.loads((run / _OUTCOME_FILE).read_text(encoding="utf-8"))
        return Outcome(**{**values, "last_words": tuple(values["last_words"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
