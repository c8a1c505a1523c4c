"""Whether this package's scripts take overrides, found out without starting one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lightning_dist.config_store import SEARCH_PATH, check_overrides, register, to_run_config
from lightning_dist.errors import ConfigError
from lightning_dist.experiment.arms import PLACE, key_of

_ROOT = "train"


def check_composes(command: Sequence[str], overrides: Sequence[str]) -> bool:
    """Compose the config of a command, if its script is one that uses this package's root config.

    Args:
        command: The words of the command.
        overrides: Those that it is to take besides its own.

    Returns:
        Whether the script is such a one; of another, nothing is known.

    Raises:
        ConfigError: An override is unknown, or does not go with the others.
    """
    place = next((place for place, word in enumerate(command) if _is_ours(word)), None)
    if place is None:
        return False
    own = [word for word in command[place + 1 :] if word != PLACE and key_of(word) is not None]
    given = [word for word in (*own, *overrides) if not (key_of(word) or "").startswith("hydra.")]
    check_overrides(given)
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(SEARCH_PATH.removeprefix("pkg://"), version_base="1.3"):
            to_run_config(compose(_ROOT, overrides=given))
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).partition("Config search path")[0].split())
        raise ConfigError(f"it cannot be composed: {reason}") from error
    return True


def _is_ours(word: str) -> bool:
    path = Path(word)
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return SEARCH_PATH in text and f'config_name="{_ROOT}"' in text
