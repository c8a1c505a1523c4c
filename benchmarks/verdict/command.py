"""The command line of the verdict's benchmark; see :mod:`benchmarks.verdict.__main__`."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, commit, today
from benchmarks.verdict.cases import SETS, CaseSet, make_case
from benchmarks.verdict.performing import Hosts, Performed
from benchmarks.verdict.report import markdown
from benchmarks.verdict.scoring import Judged, Score, judge, score
from benchmarks.verdict.truth import shares, why_not
from lightning_dist.errors import RecordError
from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.run_files import read_run
from lightning_dist.monitor.verdict import Verdict

_MOST_TRIES = 1.5  # seeds for each case wanted


def main(argv: Sequence[str] | None = None) -> int:
    """Perform what is missing of the sets, judge all of them, and write what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict")
    parser.add_argument("--set", nargs="+", choices=list(SETS), default=["judge", "judge2", "judge0"], dest="sets")
    parser.add_argument("--cases", type=int, help="so many that count, instead of all of a set")
    parser.add_argument(
        "--work", type=Path, default=Path("outputs/verdict"), help="runs are kept here, and gone on with"
    )
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no run later")
    parser.add_argument("--record-only", action="store_true", help="judge nothing yet: a later call does")
    parser.add_argument("--list", action="store_true", help="also those judged wrong, and those that do not count")
    parser.add_argument(
        "--output", type=Path, help="JSON file, with Markdown beside it; default: none for training sets"
    )
    given = parser.parse_args(argv)
    console = Console(width=160, highlight=False)
    end_s = time.monotonic() + given.limit_s
    results: dict[str, Any] = {}
    for name in given.sets:
        count = given.cases or SETS[name].count
        folder = given.work / name
        folder.mkdir(parents=True, exist_ok=True)
        perform_missing(SETS[name], count, folder, end_s=end_s, console=console)
        if given.record_only:
            continue
        performed = read_performed(folder)
        judged = [judge_run(each, folder) for each in counting(performed, count)]
        show(name, performed, judged, console, lists=given.list)
        results[name] = {
            "runs": [asdict(each) for each in judged],
            "score": asdict(score(judged)),
            "left_out": {str(each.seed): why for each in performed if (why := why_not(each)) is not None},
            "seeds": [SETS[name].first_seed, SETS[name].first_seed + len(performed)],
            "wanted": count,
            "median_step_s": sorted(each.step_s for each in performed)[len(performed) // 2] if performed else None,
        }
    path = given.output
    if given.record_only:
        return 0
    if path is None and all(name.startswith("judge") for name in given.sets):
        path = RESULTS / f"{today()}-verdict.json"
    if path is not None:
        words = sys.argv[1:] if argv is None else argv
        document = json.loads(path.read_text()) if path.exists() else {"sets": {}}
        document |= {"command": shlex.join(["python", "-m", "benchmarks.verdict", *words])}
        document |= {"date": today(), "commit": commit()}
        document["sets"] |= results
        path.write_text(json.dumps(document, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(markdown(document)) + "\n")
        console.print(f"written: {path}")
    return 0


def perform_missing(case_set: CaseSet, count: int, folder: Path, *, end_s: float, console: Console) -> None:
    """Go on where the last call stopped, until enough runs count."""
    performed = read_performed(folder)
    if _is_enough(performed, count):
        return
    with Hosts() as hosts, (folder / "performed.jsonl").open("a+") as file:
        while not _is_enough(performed, count) and time.monotonic() < end_s:
            case = make_case(case_set, missing(case_set, performed))
            performed.append(hosts.perform(case, folder / str(case.seed)))
            append_performed(file, performed[-1])
            console.print(_line(performed[-1]))


def _is_enough(performed: Sequence[Performed], count: int) -> bool:
    return len(counting(performed, count)) >= count or len(performed) >= _MOST_TRIES * count


def counting(performed: Sequence[Performed], count: int) -> list[Performed]:
    """The first so many that count."""
    return [each for each in performed if why_not(each) is None][:count]


def read_performed(folder: Path) -> list[Performed]:
    """What earlier calls have done, by seed; lines that were torn when they were killed are done again."""
    path = folder / "performed.jsonl"
    found: dict[int, Performed] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            fields = json.loads(line)
            found[fields["seed"]] = Performed(**{**fields, "causes": tuple(fields["causes"])})
        except (ValueError, TypeError, KeyError):
            continue
    return [found[seed] for seed in sorted(found)]


def append_performed(file: IO[str], performed: Performed) -> None:
    """Add a line, on one of its own also where the last one is torn."""
    file.seek(0)
    is_torn = file.read()[-1:] not in ("", "\n")
    file.write("\n" * is_torn + json.dumps(asdict(performed)) + "\n")
    file.flush()


def missing(case_set: CaseSet, performed: Sequence[Performed]) -> int:
    """The number of the first case that is not there."""
    seeds = {each.seed for each in performed}
    return next(number for number in itertools.count() if case_set.first_seed + number not in seeds)


def judge_run(performed: Performed, folder: Path) -> Judged:
    """Read what its monitor has left, and hold the verdict against the truth."""
    try:
        verdict = diagnose(read_run(folder / str(performed.seed)))
    except RecordError as error:
        verdict = Verdict(None, no_verdict=f"no record: {error}")
    run = performed.run
    return judge(performed.seed, run["strategy"], shares(performed), run["slow_rank"], verdict)


def _line(performed: Performed) -> str:
    what = " + ".join(performed.causes) or "healthy"
    if performed.failure is not None:
        return f"  {performed.seed} {what}: failed\n{performed.failure}"
    costs = ", ".join(f"{cause} {share:.0%}" for cause, share in shares(performed).items()) or "nothing put in"
    why = why_not(performed)
    return (
        f"  {performed.seed} {performed.run['strategy']}: {costs}; step {performed.step_s * 1e3:.0f} ms, compute "
        f"{performed.compute_s * 1e3:.0f}; took {performed.took_s:.1f} s" + (f"; left out: {why}" if why else "")
    )


def show(name: str, performed: Sequence[Performed], judged: Sequence[Judged], console: Console, *, lists: bool) -> None:
    """A table of a set, and what went wrong."""
    scored = score(judged)
    low, high = scored.interval
    console.print(
        f"{name}: {scored.right} of {scored.runs} right (95 % interval {low:.1%} to {high:.1%}), "
        f"{len(performed)} runs performed"
    )
    table = Table("put in", "said", "runs")
    for truth, said, number in rows(scored):
        table.add_row(truth, said, str(number))
    console.print(table)
    if lists:
        for each in judged:
            if not each.is_right:
                costs = ", ".join(f"{cause} {share:.0%}" for cause, share in each.shares.items()) or "healthy"
                console.print(f"  {each.seed} {each.strategy}: {costs}; said {' + '.join(each.said)}: {each.summary}")
        for run in performed:
            if (why := why_not(run)) is not None:
                console.print(f"  {run.seed} {run.run['strategy']} {' + '.join(run.causes)}: left out, {why}")


def rows(scored: Score) -> Iterator[tuple[str, str, int]]:
    """Of the confusion table."""
    for truth, said in scored.confusion.items():
        for words, number in said.items():
            yield truth, words, number
