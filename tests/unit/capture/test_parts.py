"""The parts of a capture: patches, batches, buckets, a device's moments, commits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from torch.utils.flop_counter import FlopCounterMode

from lightning_dist import ClusterMonitor, MonitorConfig, MonitorOutputs, StepTimeline
from lightning_dist.capture.batches import measure, together
from lightning_dist.capture.collectives import Watched, WatchedWork
from lightning_dist.capture.commit import commit_of
from lightning_dist.capture.device_times import COMPUTE, DeviceTimes
from lightning_dist.capture.flops import FlopCount
from lightning_dist.capture.patches import Patches
from lightning_dist.capture.reducer import transfers
from lightning_dist.capture.run_folder import _make, run_folder
from lightning_dist.errors import ConfigError
from lightning_dist.events import EventStream
from lightning_dist.monitor.steps import Batches


class Greeter:
    def greet(self) -> str:
        return "hello"


def louder(original: Any) -> Any:
    return lambda: original().upper()


def test_patches_are_undone_completely() -> None:
    greeter, patches = Greeter(), Patches()
    patches.replace(greeter, "greet", louder)
    patches.replace(greeter, "greet", lambda original: lambda: original() + "!")
    assert greeter.greet() == "HELLO!"
    patches.undo()
    patches.undo()
    assert vars(greeter) == {}
    assert greeter.greet() == "hello"


def test_an_attribute_of_the_object_itself_comes_back() -> None:
    greeter, patches = Greeter(), Patches()
    greeter.greet = own = lambda: "own"  # type: ignore[method-assign]
    patches.replace(greeter, "greet", louder)
    assert greeter.greet() == "OWN"
    patches.undo()
    assert vars(greeter)["greet"] is own


def test_what_somebody_else_has_replaced_since_is_left_alone() -> None:
    greeter, patches = Greeter(), Patches()
    patches.replace(greeter, "greet", louder)
    before = greeter.greet
    greeter.greet = lambda: f"<{before()}>"  # type: ignore[method-assign]
    patches.undo()
    assert greeter.greet() == "<HELLO>"


def test_what_is_not_there_is_an_error_and_nothing_is_replaced() -> None:
    greeter, patches = Greeter(), Patches()
    with pytest.raises(AttributeError):
        patches.replace(greeter, "wave", louder)
    assert vars(greeter) == {}


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(8, 3), torch.zeros(8)), Batches(1, 8, None, 8 * 4 * 4)),
        ({"ids": torch.zeros(4, 16, dtype=torch.int64), "n": 3}, Batches(1, 4, 64, 512)),
        ([torch.zeros(()), {"x": [torch.zeros(5, 2)]}], Batches(1, 5, None, 44)),
        (Sample(torch.zeros(2, 7, dtype=torch.int32), torch.zeros(2, 7)), Batches(1, 2, 14, 112)),
        ("no tensors", Batches(1, None, None, None)),
    ],
)
def test_batches_are_measured(batch: Any, expected: Batches) -> None:
    assert measure(batch) == expected


class Endless(Sequence[int]):
    """More items than there is time for."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        assert index < 2000, "too many are looked at"
        return index


def test_of_a_long_list_the_first_items_are_looked_at() -> None:
    assert measure((torch.zeros(8, 3), Endless())) == Batches(1, 8, None, None)
    assert measure([torch.zeros(2)] * 900) == Batches(1, 2, None, 900 * 8)
    assert measure([torch.zeros(2)] * 2000) == Batches(1, 2, None, None)


def test_a_batch_that_holds_itself_ends() -> None:
    batch: list[Any] = [torch.zeros(5)]
    batch.append(batch)
    assert measure(batch).samples == 5


def test_tokens_may_be_counted_by_the_user() -> None:
    assert measure((torch.zeros(8, 3),), lambda batch: 7).tokens == 7


def test_batches_of_a_step_add_up_and_what_is_unknown_stays_so() -> None:
    one = together(None, Batches(1, 8, 64, 100))
    assert together(one, Batches(1, 4, 32, 50)) == Batches(2, 12, 96, 150)
    assert together(one, Batches(1, None, 32, None)) == Batches(2, None, 96, None)


def test_buckets_travel_one_after_another_at_the_rate_the_last_one_shows() -> None:
    # 20 bytes in 20 ns after the last of two that are far apart: 1 ns a byte.
    assert transfers([100, 1000], [50, 20], 1020) == [(100, 150), (1000, 1020)]
    # The second has to wait for the first: 60 bytes in 120 ns.
    assert transfers([0, 10], [30, 30], 120) == [(0, 60), (60, 120)]


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), min_size=1, max_size=12), st.integers(0, 10**9)
)
def test_transfers_lie_between_completion_and_end_and_do_not_overlap(
    buckets: list[tuple[int, int]], longer: int
) -> None:
    launched = sorted(moment for moment, _ in buckets)
    end = launched[-1] + longer
    found = transfers(launched, [size for _, size in buckets], end)
    assert all(moment <= start <= stop <= end for moment, (start, stop) in zip(launched, found, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))


class FakeStream:
    """Work of a device: events recorded on it have come once ``run`` was called."""

    def __init__(self) -> None:
        self.pending: list[FakeEvent] = []

    def run(self, at_ms: float) -> None:
        for event in self.pending:
            event.at_ms = at_ms
        self.pending.clear()


class FakeEvent:
    at_ms: float | None = None

    def record(self, stream: FakeStream) -> None:
        stream.pending.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None
        return later.at_ms - self.at_ms


def test_a_devices_moments_are_read_once_it_has_come_to_them() -> None:
    streams = [FakeStream(), FakeStream()]
    current = streams[0]
    times = DeviceTimes(
        torch.device("cpu"),
        lambda: 5_000_000,
        new_event=lambda device: FakeEvent(),  # type: ignore[arg-type, return-value]
        current_stream=lambda device: current,  # type: ignore[arg-type, return-value]
    )
    events = EventStream()
    events.device_clock = times
    streams[0].run(1.0)
    start = events.mark()
    streams[0].run(2.0)
    events.span_from("step.forward", start)
    current = streams[1]
    events.step = 1
    with events.measure_work("comm.cross", lane="cross"):
        pass
    assert times.read() == 2
    assert events.snapshot() == []
    streams[0].run(4.5)
    assert times.read() == 1
    (forward,) = events.snapshot()
    assert (forward.start_ns, forward.end_ns, forward.thread, forward.step) == (6_000_000, 8_500_000, COMPUTE, 0)
    streams[1].run(5.0)
    assert times.read() == 0
    assert events.snapshot()[1].thread != COMPUTE
    assert events.snapshot()[1].end_ns == 9_000_000


def test_a_device_that_stands_still_is_not_waited_for() -> None:
    times = DeviceTimes(
        torch.device("cpu"),
        lambda: 0,
        new_event=lambda device: FakeEvent(),  # type: ignore[arg-type, return-value]
        current_stream=lambda device: STILL,  # type: ignore[arg-type, return-value]
    )
    called: list[int] = []
    times.when_known((times.mark(),), called.append)
    assert times.read_within(0.005) == 1
    assert called == []


STILL = FakeStream()
COMMIT, OTHER = "a" * 40, "b" * 40


def test_the_commit_is_read_from_a_repositorys_files(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    inside = tmp_path / "src/package"
    inside.mkdir(parents=True)
    assert commit_of(inside) is None
    (git / "packed-refs").write_text(f"# pack-refs\n{OTHER} refs/heads/other\n{COMMIT} refs/heads/main\n")
    assert commit_of(inside) == COMMIT
    (git / "refs/heads/main").write_text(OTHER + "\n")
    assert commit_of(inside) == OTHER
    (git / "HEAD").write_text(COMMIT + "\n")
    assert commit_of(inside) == COMMIT


def test_what_is_no_commit_is_not_said(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / ".git/HEAD").write_text("ref: ../token\n")
    assert commit_of(tmp_path) is None


def test_a_folder_that_is_none_is_said_to_all_ranks(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu", devices=1)
    assert run_folder(trainer, "no\0name") is None
    assert run_folder(trainer, tmp_path / "runs") == tmp_path / "runs"


def test_runs_that_start_at_once_share_no_folder(tmp_path: Path) -> None:
    first = tmp_path / "runs" / "monitor"
    ready = threading.Barrier(8)

    def start(_: int) -> Path:
        ready.wait(timeout=30)
        return _make(first)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(start, range(8)))
    assert sorted(made) == sorted([first, *(first.with_name(f"monitor-{number}") for number in range(1, 8))])


def test_an_empty_folder_is_taken_and_one_with_files_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert _make(tmp_path / "empty") == tmp_path / "empty"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    assert _make(tmp_path / "full") == tmp_path / "full-1"


def test_files_of_a_run_whose_root_is_a_url_are_local_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"logger": False, "accelerator": "cpu", "devices": 1}
    trainer = Trainer(default_root_dir="memory://bucket/runs", **arguments)
    with pytest.warns(UserWarning, match=r"memory://bucket/runs is a URL: they go to .*/monitor\. For another folder"):
        assert run_folder(trainer) == tmp_path / "monitor"
    assert run_folder(trainer, "mine") == tmp_path / "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "monitor"]
    local = Trainer(default_root_dir=f"file://{tmp_path}/here", **arguments)
    assert run_folder(local) == tmp_path / "here" / "monitor"


@pytest.mark.parametrize("url", ["s3://bucket/a", Path("s3://bucket/a"), "simplecache::s3://bucket/a"])
def test_a_url_is_no_folder_for_the_monitors_files(url: Any) -> None:
    makers: list[Any] = [
        *(lambda: StepTimeline(url), lambda: ClusterMonitor(url), lambda: MonitorOutputs(history=url)),
        *(lambda: MonitorConfig(folder=str(url)), lambda: MonitorConfig(history=str(url))),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match=r"(folder|history)\)?=.* is a URL, and these files are local"):
            make()


def test_what_a_formula_raises_is_not_the_trainings() -> None:
    def broken(*shapes: Any, **others: Any) -> int:
        raise ValueError("as planned")

    count, weights = FlopCount(), torch.ones(3, 3)
    assert count.counted(lambda: weights @ weights).sum() == 27
    assert (count.total, count.problem) == (54, None)
    with patch.dict("torch.utils.flop_counter.flop_registry", {torch.ops.aten.mm: broken}):
        assert count.counted(lambda: weights @ weights).sum() == 27
    assert count.problem == "ValueError: as planned"
    assert count.per_sample(8) is None
    assert count.counted(lambda: 7) == 7


def test_a_counter_that_fails_to_open_or_to_close_is_not_the_trainings() -> None:
    def failing(*arguments: Any) -> None:
        raise RuntimeError("as planned")

    for name in ("__enter__", "get_total_flops"):
        count = FlopCount()
        with patch.object(FlopCounterMode, name, failing):
            assert count.counted(lambda: 7) == 7
        assert count.problem == "RuntimeError: as planned"


def test_what_the_user_raises_is_raised() -> None:
    count = FlopCount()
    with pytest.raises(KeyError):
        count.counted(lambda: {}["x"])
    assert count.problem is None
    assert count.counted(lambda: 7) == 7


def test_the_commit_of_a_linked_worktree_is_its_own(tmp_path: Path) -> None:
    linked = tmp_path / "main/.git/worktrees/w"
    linked.mkdir(parents=True)
    (linked / "HEAD").write_text("ref: refs/heads/w\n")
    (linked / "commondir").write_text("../..\n")
    (tmp_path / "main/.git/refs/heads").mkdir(parents=True)
    (tmp_path / "main/.git/refs/heads/w").write_text(COMMIT + "\n")
    worktree = tmp_path / "w"
    worktree.mkdir()
    (worktree / ".git").write_text(f"gitdir: {linked}\n")
    assert commit_of(worktree) == COMMIT
    assert commit_of(tmp_path) is None


def test_a_watched_operation_answers_as_the_backends() -> None:
    """What it did not hand on would ask a `Work` that is never done."""
    asked: list[str] = []

    class Backends:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: asked.append(name)

    watched = Watched(EventStream(), tier="host", is_on=lambda: True)
    work = WatchedWork(cast(dist.Work, Backends()), watched, "all_reduce", 4, 0)
    names = {name for name in dir(dist.Work) if not name.startswith("_")} - {"unbox"}
    for name in names:
        getattr(work, name)()
    assert {name.removeprefix("_") for name in asked} == names
    assert [event.name for event in watched.events.snapshot()] == ["comm.wait", "comm.all_reduce"]
