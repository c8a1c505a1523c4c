"""``make bench``: every scenario of every benchmark, or one of them: ``make bench ARGS="recompute --rounds 3"``."""

import sys
from collections.abc import Callable, Sequence

from benchmarks import memory, meta_build, pipeline, recompute, step_time

BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "step_time": step_time.main,
    "memory": memory.main,
    "recompute": recompute.main,
    "meta_build": meta_build.main,
    "pipeline": pipeline.main,
}


def main(argv: Sequence[str]) -> int:
    """Run the one that is named, or all."""
    if argv:
        if argv[0] not in BENCHMARKS:
            sys.exit(f"{argv[0]} is no benchmark; there are: {', '.join(BENCHMARKS)}")
        return BENCHMARKS[argv[0]](argv[1:])
    return (
        step_time.main(["--all"]) or memory.main([]) or recompute.main([]) or meta_build.main([]) or pipeline.main([])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
