"""Does what the Trainer asks for fit what a launcher outside (ours, torchrun, SLURM, an earlier Trainer) has started?

Pure: environment variables are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dist.elastic.launched import AGENT_VARIABLE
from lightning_dist.errors import LaunchError

RANKS_VARIABLE = "HIERDIST_WORLD_SIZE"  # number of ranks that were started by running the script again


def check_environment(num_devices: int, num_nodes: int, environ: Mapping[str, str]) -> None:
    """Compare what the Trainer asks for with what a launcher outside has started.

    Args:
        num_devices: Ranks a host.
        num_nodes: Hosts.
        environ: Environment variables.

    Raises:
        LaunchError: They differ. The message says what is set and what to write instead.
    """
    asked = num_devices * num_nodes
    asked_text = f"the Trainer asks for devices={num_devices} x num_nodes={num_nodes} = {asked} ranks"
    if AGENT_VARIABLE in environ:
        world, local = _count(environ, "WORLD_SIZE"), _count(environ, "LOCAL_WORLD_SIZE")
        launcher, variable = "hierdist launch", "WORLD_SIZE"
        other = f"start it with --ranks-per-host {num_devices}"
    elif "TORCHELASTIC_RUN_ID" in environ:
        world, local = _count(environ, "WORLD_SIZE"), _count(environ, "LOCAL_WORLD_SIZE")
        launcher, variable = "torchrun", "WORLD_SIZE"
        other = f"start torchrun with --nnodes={num_nodes} --nproc-per-node={num_devices}"
    elif "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        world, local = _count(environ, "SLURM_NTASKS"), _count(environ, "SLURM_NTASKS_PER_NODE")
        launcher, variable = "SLURM", "SLURM_NTASKS"
        other = f"ask SLURM for --nodes={num_nodes} --ntasks-per-node={num_devices} and start with srun"
    elif RANKS_VARIABLE in environ:
        world, local = _count(environ, RANKS_VARIABLE), None
        launcher, variable = "an earlier Trainer of this script", RANKS_VARIABLE
        other = "give all Trainers of a script the same devices and num_nodes"
    elif "LOCAL_RANK" in environ and "WORLD_SIZE" in environ:
        world, local = _count(environ, "WORLD_SIZE"), _count(environ, "LOCAL_WORLD_SIZE")
        launcher, variable = "the environment", "WORLD_SIZE"
        other = f"set WORLD_SIZE={asked}, or unset LOCAL_RANK and WORLD_SIZE to let the Trainer start its ranks"
    else:
        return
    if world is None or (world == asked and local in (None, num_devices)):
        return
    if local == num_devices and _count(environ, "GROUP_WORLD_SIZE") == num_nodes:
        return  # hosts of different sizes: each Trainer names its own host's ranks
    given = f"{variable}={world}" + (f", {local} on this host" if local else "")
    fitting = f"Trainer(devices={local}, num_nodes={world // local})" if local and world % local == 0 else None
    if fitting is None and world % num_nodes == 0:
        fitting = f"Trainer(devices={world // num_nodes}, num_nodes={num_nodes})"
    advice = f"Write {fitting}, or {other}" if fitting else other[0].upper() + other[1:]
    raise LaunchError(f"{launcher} has started {world} ranks ({given}), but {asked_text}. {advice}.")


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} in the environment is not a number of ranks") from None
