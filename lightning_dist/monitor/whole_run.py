"""A run read with all its rounds: the folders that lie beside each other, and what agents have written down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lightning_dist import incidents
from lightning_dist.errors import RecordError
from lightning_dist.incidents import Incident
from lightning_dist.monitor.record import RunFacts
from lightning_dist.monitor.rounds import WholeRun, in_order
from lightning_dist.monitor.run_files import is_run, read_facts, read_run


def read_whole(*folders: Path) -> WholeRun:
    """Read a run, given the folders of one of its rounds.

    Rounds are folders beside each other (``monitor``, ``monitor-1``, ...) whose ``run.json`` has the same name of a
    run, as launchers give it; without such a name, a run has one round. If the script trains several times, the second
    fit of a round goes with the second fits of the others. Incidents lie beside these folders, or where the launcher
    says.

    Raises:
        RecordError: The round that is named cannot be read. What of the others cannot is among the problems.
    """
    chosen = read_run(*folders)
    home = next((folder for folder in folders if is_run(folder)), folders[0])
    rounds, problems = [chosen], []
    for parts in _other_rounds(folders, home, chosen.facts):
        try:
            rounds.append(read_run(*parts))
        except RecordError as error:
            problems.append(str(error))
    ordered = in_order(rounds)
    places = dict.fromkeys([home.parent, *(Path(each.facts.record) for each in ordered if each.facts.record)])
    return WholeRun(ordered, _incidents(places, chosen.facts.run, problems), tuple(problems))


def round_folders(folder: Path) -> tuple[Path, ...]:
    """A folder and those of the other rounds of its run, if it has a name."""
    facts = _facts(folder)
    others = () if facts is None else tuple(_other_rounds([folder], folder, facts))
    return (folder, *(part for parts in others for part in parts))


def is_round_of(folder: Path, facts: RunFacts) -> bool:
    """Whether a folder holds a round of a run that has a name."""
    other = _facts(folder) if facts.run else None
    return other is not None and other.run == facts.run


def _facts(folder: Path) -> RunFacts | None:
    """``None``: it holds no run, or one that cannot be read."""
    try:
        return read_facts(folder) if is_run(folder) else None
    except RecordError:
        return None


def _other_rounds(folders: Sequence[Path], home: Path, facts: RunFacts) -> Iterator[list[Path]]:
    """Of each other round, the folders of its parts, where hosts had none in common."""
    if not facts.run:
        return
    parents = list(dict.fromkeys(folder.absolute().parent for folder in folders))
    fits: dict[int, list[str]] = {}  # names of folders by round, in the order in which they were made
    found = [
        (each.started, path.name, each.round)
        for parent in parents
        for path in _folders(parent)
        if (each := _facts(path)) is not None and each.run == facts.run
    ]
    for _, name, number in sorted(found):
        fits.setdefault(number, []).append(name)
    place = fits[facts.round].index(home.absolute().name)
    for number, names in sorted(fits.items()):
        if number != facts.round:
            name = names[min(place, len(names) - 1)]
            yield [parent / name for parent in parents if (parent / name).is_dir()]


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []


def _incidents(places: Iterable[Path], run: str, problems: list[str]) -> tuple[Incident, ...]:
    """Of the first place that has any of this run."""
    for place in places:
        try:
            found = tuple(incident for incident in incidents.read(place) if incident.run in ("", run))
        except (OSError, RecordError) as error:
            problems.append(f"incidents cannot be read: {error}")
            continue
        if found:
            return found
    return ()
