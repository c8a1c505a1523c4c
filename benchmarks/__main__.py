"""``make bench``: every scenario of every benchmark, or one of them: ``make bench ARGS="recompute --rounds 3"``."""

import sys
from collections.abc import Callable, Sequence

from benchmarks import (
    checkpoint,
    codecs,
    memory,
    meta_build,
    monitor,
    parameter_server,
    pipeline,
    recompute,
    resume,
    sparse,
    step_time,
)
from benchmarks.compression import command as compression
from benchmarks.data import command as data
from benchmarks.elastic import command as elastic
from benchmarks.ending import clean_up_when_terminated
from benchmarks.verdict import command as verdict

BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "step_time": step_time.main,
    "memory": memory.main,
    "recompute": recompute.main,
    "meta_build": meta_build.main,
    "pipeline": pipeline.main,
    "checkpoint": checkpoint.main,
    "data": data.main,
    "resume": resume.main,
    "verdict": verdict.main,
    "monitor": monitor.main,
    "elastic": elastic.main,
    "sparse": sparse.main,
    "parameter_server": parameter_server.main,
    "codecs": codecs.main,
    "compression": compression.main,
}


def main(argv: Sequence[str]) -> int:
    """Run the one that is named, or all."""
    if argv:
        if argv[0] not in BENCHMARKS:
            sys.exit(f"{argv[0]} is no benchmark; there are: {', '.join(BENCHMARKS)}")
        return BENCHMARKS[argv[0]](argv[1:])
    default = {"step_time": ["--all"], "compression": ["time"]}
    every = {name: default.get(name, []) for name in BENCHMARKS}
    return next((status for name, given in every.items() if (status := BENCHMARKS[name](given))), 0)


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main(sys.argv[1:]))
