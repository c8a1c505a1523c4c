"""The pool of ready ranks: results, failures, hangs, leaks, deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.fresh import run_script
from tests.support.processes import REPO_ROOT, pid_lives
from tests.support.ranks import Died, RankContext, RankPool, RanksFailed

LONG_S = 1000.0
_parked = threading.Event()


def add_ranks(context: RankContext, start: int, *, factor: int = 1) -> int:
    total = torch.tensor([context.rank * factor])
    dist.all_reduce(total)
    return start + int(total)


def describe_seat(context: RankContext) -> tuple[str, int, str, str, str]:
    variables = os.environ
    return context.host, context.local_rank, variables["HIERDIST_HOST"], variables["RANK"], variables.get("COLOR", "")


def change_everything(context: RankContext) -> int:
    os.environ["STRAY"] = "1"
    os.chdir(context.tmp_path)
    torch.set_default_dtype(torch.float64)
    (context.tmp_path / f"{context.rank}").touch()
    context.barrier()
    return len([path for path in context.tmp_path.iterdir() if not path.name.startswith(".")])


def show_state(context: RankContext) -> tuple[str | None, str, str, float]:
    return os.environ.get("STRAY"), os.getcwd(), str(torch.get_default_dtype()), float(torch.rand(()))


def raise_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("this rank is broken")
    context.barrier()


def reset_signals(context: RankContext) -> None:
    """What a Lightning Trainer does when it ends: handlers that Python does not know of are gone."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def hang_on_rank_0(context: RankContext) -> None:
    print("about to wait")
    if context.rank == 0:
        _parked.wait(LONG_S)
    context.barrier()


def leave_a_thread(context: RankContext) -> None:
    threading.Thread(target=_parked.wait, args=(LONG_S,), name="forgotten", daemon=True).start()


def leave_a_child(context: RankContext) -> int:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def leave_a_descriptor(context: RankContext) -> None:
    os.open(context.tmp_path, os.O_RDONLY)


def die_on_rank_1(context: RankContext) -> str:
    token = torch.ones(1)
    if context.rank == 1:
        dist.recv(token, src=0)  # before it says so, it may still be connecting, which would fail
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.send(token, dst=1)
        dist.recv(token, src=1)
    except RuntimeError:
        return "saw it"
    return "saw nothing"


def stop_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def own_pid(context: RankContext) -> int:
    return os.getpid()


def no_group(context: RankContext) -> bool:
    return dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(ranks: RankPool, world_size: int) -> None:
    total = 10 + 2 * sum(range(world_size))
    results = ranks.run(add_ranks, world_size=world_size, args=(10,), kwargs={"factor": 2})
    assert results == [total] * world_size


def test_ranks_know_their_seat(ranks: RankPool) -> None:
    colors = [{"COLOR": color} for color in ("red", "green", "blue")]
    results = ranks.run(describe_seat, layout=[["a", [0, 2]], ["b", [1]]], env_per_rank=colors)
    assert results == [("a", 0, "a", "0", "red"), ("b", 0, "b", "1", "green"), ("a", 1, "a", "2", "blue")]


def test_processes_are_used_again_in_the_state_of_new_ones(ranks: RankPool) -> None:
    first = ranks.run(own_pid, world_size=2)
    assert ranks.run(change_everything, world_size=2) == [2, 2]
    assert set(ranks.run(own_pid, world_size=2)) <= set(ranks.pids)
    assert set(first) <= set(ranks.pids)
    states = ranks.run(show_state, world_size=2)
    assert states[0][:3] == (None, str(REPO_ROOT), "torch.float32")
    assert states[0] == states[1]


def test_the_group_is_made_only_if_wanted(ranks: RankPool) -> None:
    assert ranks.run(no_group, world_size=2, init_group=False) == [False, False]


def test_an_exception_is_shown_with_its_rank_and_traceback(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(raise_on_rank_1, world_size=2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.failures[0].rank == 1
    assert "rank 1 raised: ValueError: this rank is broken" in str(caught.value)
    assert "in raise_on_rank_1" in str(caught.value)
    assert "rank 0 raised" in str(caught.value)  # its barrier lost the peer
    assert ranks.run(add_ranks, world_size=2, args=(0,)) == [1, 1]


def test_a_hang_ends_by_the_deadline_with_stacks_and_the_pool_goes_on(ranks: RankPool) -> None:
    ranks.run(reset_signals, world_size=2)
    before = ranks.run(own_pid, world_size=2)
    started_s = time.monotonic()
    with pytest.raises(RanksFailed, match="no answer within 4 s") as caught:
        ranks.run(hang_on_rank_0, world_size=2, deadline_s=4.0)  # until then they have met, on a busy machine too
    assert time.monotonic() - started_s < 60  # a hang, not a duration: far from LONG_S
    assert "in hang_on_rank_0" in caught.value.of_rank(0).details
    assert "barrier" in caught.value.of_rank(1).details
    assert "about to wait" in caught.value.of_rank(0).output
    assert not any(pid_lives(pid) for pid in {*before} - {*ranks.pids})
    assert ranks.run(add_ranks, world_size=2, args=(0,)) == [1, 1]


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (leave_a_thread, "thread 'forgotten' still runs"),
        (leave_a_child, "sleep 1000"),
        (leave_a_descriptor, "file descriptor"),
    ],
)
def test_what_a_rank_leaves_behind_is_an_error(ranks: RankPool, function: object, shown: str) -> None:
    with pytest.raises(RanksFailed, match=shown):
        ranks.run(function, world_size=1)  # type: ignore[arg-type]
    assert ranks.run(add_ranks, world_size=1, args=(3,)) == [3]


def test_children_of_a_rank_die_with_it(ranks: RankPool) -> None:
    (child,) = ranks.run(leave_a_child, world_size=1, fresh=True)
    assert not pid_lives(child)


def test_a_rank_that_dies_is_named_with_its_signal(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 died: killed by SIGKILL"):
        ranks.run(die_on_rank_1, world_size=2)


def test_a_rank_may_die_if_the_call_says_so(ranks: RankPool) -> None:
    assert ranks.run(die_on_rank_1, world_size=2, may_die=[1]) == ["saw it", Died(-signal.SIGKILL)]


def test_a_stopped_rank_ends_by_the_deadline(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="it was stopped") as caught:
        ranks.run(stop_on_rank_1, world_size=2, deadline_s=4.0)
    assert "in stop_on_rank_1" in caught.value.of_rank(1).details


def test_functions_that_ranks_cannot_import_are_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        ranks.run(lambda context: None, world_size=1)


def test_a_pool_whose_process_is_killed_leaves_no_rank(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\n"
        "from tests.support.forkserver import ForkServer\n"
        "from tests.support.ranks import RankPool\n"
        "def pid(context):\n    return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(server=ForkServer(preload=['torch']))\n"
        "    print(pool.run(pid, world_size=2, init_group=False), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = run_script(script, env={"TMPDIR": str(tmp_path)})  # what a killed process cannot remove
    assert result.returncode == -signal.SIGKILL, result.output
    assert result.stdout.startswith("["), result.output
    assert result.survivors == ()
