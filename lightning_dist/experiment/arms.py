"""What is compared: two arms, a command that takes their overrides, seeds, and the order of the runs. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dist.errors import ConfigError

ARMS = ("a", "b")
PLACE = "{}"
"""A word of the command that stands for the overrides; without one they come last."""

_OVERRIDE = re.compile(r"(\+{1,2}|~)?(?P<key>[A-Za-z_][\w./@:-]*)(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class RunName:
    """One run: of an arm, with a seed."""

    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """What is run.

    Attributes:
        a: Overrides of the first arm, which is what is used so far.
        b: Those of the second, which is judged.
        command: What trains; it takes Hydra's overrides.
        steps: Optimizer steps of each run; ``None``: what the command does by itself.
        seed_option: Override that gives the seed of weights and of the order of samples.
        steps_option: Override that gives the number of steps.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    command: tuple[str, ...]
    steps: int | None = None
    seed_option: str = "seed"
    steps_option: str = "trainer.max_steps"

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(
                "there is no command to run; write it after --: hierdist ab --a sync=hierarchical --b sync=bf16 -- "
                "python train.py"
            )
        if sorted(self.a) == sorted(self.b):
            raise ConfigError(
                f"--a and --b are the same ({said(self.a)}): write what is to be compared, e.g. --a sync=hierarchical "
                "--b sync=bf16"
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps must be at least 1, got {self.steps}")
        _check_keys(self)

    def overrides(self, arm: str) -> tuple[str, ...]:
        """Those of an arm."""
        return self.a if arm == "a" else self.b

    def of_run(self, name: RunName, *, folder: str) -> tuple[str, ...]:
        """All overrides of a run that writes into a folder."""
        steps = () if self.steps is None else (f"{self.steps_option}={self.steps}",)
        quoted = re.sub(r"([\\'])", r"\\\1", folder)
        where = f"hydra.run.dir='{quoted}'"
        return (*self.overrides(name.arm), f"{self.seed_option}={name.seed}", *steps, where)

    def command_of(self, name: RunName, *, folder: str) -> list[str]:
        """The command line of a run."""
        overrides = self.of_run(name, folder=folder)
        if PLACE not in self.command:
            return [*self.command, *overrides]
        return [word for given in self.command for word in (overrides if given == PLACE else (given,))]


def parse_arm(option: str, given: Sequence[str]) -> tuple[str, ...]:
    """The overrides of an arm.

    Args:
        option: ``--a`` or ``--b``.
        given: What was written, each one override or several, with blanks between them; an empty one is none.

    Raises:
        ConfigError: It is no override.
    """
    try:
        words = [word for text in given for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"{option} {' '.join(given)!r} cannot be read: {error}") from error
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if match is None or ("=" not in word and not word.startswith("~")):
            raise ConfigError(
                f"{option}: {word!r} is no override; write name=value, several with blanks between them: "
                f'{option} "sync=int8 optimizer.lr=0.001"'
            )
    return tuple(words)


def said(overrides: Sequence[str]) -> str:
    """An arm in words."""
    return " ".join(overrides) or "the command as it is"


def schedule(seeds: Sequence[int]) -> Iterator[RunName]:
    """The runs in their order: ABBA, so that what drifts with time (heat, neighbours, caches) favours no arm."""
    for place, seed in enumerate(seeds):
        yield from (RunName(arm, seed) for arm in (ARMS if place % 2 == 0 else reversed(ARMS)))


def key_of(override: str) -> str | None:
    """The option that an override sets; ``None``: it is none."""
    match = _OVERRIDE.fullmatch(override)
    return match["key"] if match is not None and ("=" in override or override.startswith("~")) else None


def _check_keys(experiment: Experiment) -> None:
    """Each option is said once: Hydra would take the last one, and an arm would not be what it seems to be."""
    ours = {experiment.seed_option: "--seeds"}
    if experiment.steps is not None:
        ours[experiment.steps_option] = "--steps"
    ours["hydra.run.dir"] = "hierdist ab"
    in_command = {key for word in experiment.command if (key := key_of(word)) is not None}
    for arm in ARMS:
        keys = [key for word in experiment.overrides(arm) if (key := key_of(word)) is not None]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"--{arm} sets {key} twice: {said(experiment.overrides(arm))}; leave one")
            if key in ours:
                raise ConfigError(f"--{arm} sets {key}, which {ours[key]} sets for both arms; take it out of --{arm}")
            if key in in_command:
                raise ConfigError(
                    f"{key} is set by the command and by --{arm}; take it out of the command, and write it in both arms"
                )
    for key in sorted(in_command & set(ours)):
        raise ConfigError(f"the command sets {key}, which {ours[key]} sets; take it out of the command")
