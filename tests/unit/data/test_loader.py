"""A loader in one process: what it gives, from where it goes on, what transforms draw, what it refuses and leaves."""

from __future__ import annotations

import gc
import pickle
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_dist import DataConfig, ShardedDataModule, ShardedLoader, Source
from lightning_dist.data.loading.batches import BatchPlan, BatchReader
from lightning_dist.data.loading.loader import SKIPPED, WAIT
from lightning_dist.data.order.replicas import Replicas
from lightning_dist.errors import (
    ChangedDataError,
    ConfigError,
    DataError,
    ForeignDataError,
    UnknownOptionError,
    UnreadableShardError,
)
from lightning_dist.events import EventKind, EventStream
from tests.support.leaks import Snapshot
from tests.support.numbered import Ids, ids_of, write_tokens_of
from tests.support.sweeps import sampled


def loader_of(
    data: Any = 29, *, world_size: int = 1, replica: int = 0, role: str = "train", parts: Any = None, **options: Any
) -> ShardedLoader:
    """A loader of ids by default, on one of several replicas of one host."""
    config = DataConfig(**{"batch_size": 3, "lanes": 4, "shuffle_block": 5, **options})
    loader = ShardedLoader(Ids(data) if isinstance(data, int) else data, config=config, role=role, **(parts or {}))
    loader.place(Replicas((0,) * world_size, replica))
    return loader


def ids(batches: Any) -> list[list[int]]:
    return [ids_of(batch) for batch in batches]


def flat(parts: Any) -> list[Any]:
    return list(chain.from_iterable(parts))


def passes(loader: ShardedLoader, count: int) -> list[list[list[int]]]:
    """``[epoch][batch]``: the samples."""
    found = [ids(loader) for _ in range(count)]
    loader.close()
    return found


def steps_of(world_size: int, epochs: int = 1, **options: Any) -> list[list[list[int]]]:
    """``[step][replica]``: the samples."""
    loaders = [loader_of(world_size=world_size, replica=replica, **options) for replica in range(world_size)]
    return [list(step) for _ in range(epochs) for step in zip(*map(ids, loaders), strict=True)]


def after(loader: ShardedLoader, taken: int) -> Any:
    """The state after so many batches."""
    while taken > len(loader):
        taken -= len(list(loader))
    batches = iter(loader)
    list(islice(batches, taken))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader.close()
    return state


def resumed(state: Any, loader: ShardedLoader) -> ShardedLoader:
    loader.load_state_dict(state)
    return loader


WORKERS: dict[str, tuple[Any, ...]] = {
    "inline": ({},),
    "threads": ({"workers": 2},),
    "threads far": ({"workers": 2, "prefetch": 8},),
    "threads lasting": ({"workers": 2, "persistent": True, "prefetch": 3},),
    "one thread": ({"workers": 1, "prefetch": 1},),
    "processes": ({"workers": 2, "readers": "processes"},),
    "processes far": ({"workers": 2, "readers": "processes", "prefetch": 8},),
    "processes lasting": ({"workers": 2, "readers": "processes", "persistent": True},),
    "pinned": ({"workers": 2, "pin_memory": True},),
}
EPOCHS = {"drop": {}, "short": {"last_batch": "short"}, "pad": {"last_batch": "pad"}, "endless": {"epoch": "endless"}}


# -- order and length -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", sampled(WORKERS, ["threads far", "threads lasting", "processes lasting"]))
def test_batches_do_not_depend_on_who_reads_them(workers: dict[str, Any]) -> None:
    for options in (EPOCHS["short"], EPOCHS["endless"]):
        assert passes(loader_of(**options, **workers), 3) == passes(loader_of(**options), 3)


@pytest.mark.parametrize("options", EPOCHS.values(), ids=EPOCHS)
def test_a_step_has_the_same_samples_at_any_world_size(options: dict[str, Any]) -> None:
    expected = [sorted(step[0]) for step in steps_of(1, 2, batch_size=6, **options)]
    for world_size in (2, 3):
        steps = steps_of(world_size, 2, batch_size=6 // world_size, **options)
        assert [sorted(flat(step)) for step in steps] == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("options", EPOCHS.values(), ids=EPOCHS)
def test_length_is_right(options: dict[str, Any], world_size: int) -> None:
    for replica in range(world_size):
        loader = loader_of(world_size=world_size, replica=replica, **options)
        assert [len(loader)] * 3 == [len(list(loader)) for _ in range(3)]


def test_epochs_differ_and_each_has_every_sample_once() -> None:
    first, second = passes(loader_of(last_batch="short"), 2)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(29))
    assert first != second
    assert ids(loader_of(seed=1)) != ids(loader_of())
    assert flat(ids(loader_of(shuffle=False, lanes=1, last_batch="short"))) == list(range(29))


@pytest.mark.parametrize("role", ["evaluate", "predict"])
def test_evaluation_takes_each_sample_once_and_always_alike(role: str) -> None:
    loaders = [loader_of(10, world_size=3, replica=replica, role=role, epoch="endless") for replica in range(3)]
    once = [ids(loader) for loader in loaders]
    assert sorted(flat(flat(once))) == list(range(10))
    assert {len(batches) for batches in once} == {len(loaders[0])}
    list(islice(iter(loaders[1]), 1))
    assert [ids(loader) for loader in loaders] == once
    if role == "predict":
        assert ids(loader_of(10, role=role)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", EPOCHS.values(), ids=EPOCHS)
def test_every_resume_goes_on_exactly(options: dict[str, Any]) -> None:
    whole = flat(passes(loader_of(**options), 3))
    for taken in range(len(whole)):
        other = resumed(after(loader_of(**options), taken), loader_of(**options))
        got: list[list[int]] = []
        while len(got) < len(whole) - taken:
            got += ids(other)
        assert got == whole[taken:], taken


@pytest.mark.parametrize("workers", sampled(WORKERS, ["threads lasting", "processes"]))
def test_what_was_read_ahead_does_not_count(workers: dict[str, Any]) -> None:
    first, second = passes(loader_of(), 2)
    for taken in (4, len(first), len(first) + 4):
        other = resumed(after(loader_of(**workers), taken), loader_of(**workers))
        assert flat(passes(other, 2))[: 18 - taken] == (first + second)[taken:]


@pytest.mark.parametrize("options", [EPOCHS["short"], EPOCHS["endless"]], ids=["short", "endless"])
@pytest.mark.parametrize("sizes", [[2, 1, 3, 2], [1, 4, 2], [4, 1, 4]], ids=str)
def test_each_sample_once_at_changing_world_sizes(sizes: list[int], options: dict[str, Any]) -> None:
    """Stopped after any number of steps: at each step, no sample is more than one time ahead of another."""
    for stop in range(1, 9):
        state = None
        counts = Counter(dict.fromkeys(range(29), 0))
        for place, world_size in enumerate(sizes):
            loaders = [loader_of(world_size=world_size, replica=replica, **options) for replica in range(world_size)]
            if state is not None:
                loaders = [resumed(state, loader) for loader in loaders]
            left = stop if place < len(sizes) - 1 else 3 * len(loaders[0])
            while left > 0:
                first = loaders[0].done % len(loaders[0])
                steps = list(zip(*(ids(islice(loader, left)) for loader in loaders), strict=True))
                for step in steps:
                    counts.update(flat(step))
                    assert max(counts.values()) - min(counts.values()) <= 1
                assert first + len(steps) == len(loaders[0]) or len(steps) == left
                left -= len(steps)
            states = [loader.state_dict() for loader in loaders]
            assert all(other == states[0] for other in states)
            state = states[0]


def test_resume_with_another_batch_size() -> None:
    first = ids(loader_of(last_batch="short"))[:2]
    other = resumed(after(loader_of(last_batch="short"), 2), loader_of(last_batch="short", batch_size=5))
    assert sorted(flat(first + ids(other))) == list(range(29))
    assert other.done == len(other) == 6


def test_changed_data_are_refused_with_what_changed() -> None:
    state = after(loader_of(), 2)
    for loader, said in (
        (loader_of(30), "samples was 29, is 30"),
        (loader_of(seed=1), "order: seed was 0, is 1"),
        (loader_of(lanes=2), "order: lanes was 4, is 2"),
    ):
        with pytest.raises(ChangedDataError, match=said):
            ids(resumed(state, loader))


def test_changed_shards_are_named(tmp_path: Path) -> None:
    state = after(loader_of(write_tokens_of(tmp_path / "a", [6, 6])), 2)
    with pytest.raises(ChangedDataError, match="groups of shards differ"):
        ids(resumed(state, loader_of(write_tokens_of(tmp_path / "b", [6, 7]))))


def test_foreign_states_are_refused() -> None:
    loader = loader_of()
    with pytest.raises(ForeignDataError, match="state of another loader"):
        loader.load_state_dict({"_snapshot": {}, "_iterator_finished": True})
    with pytest.raises(ForeignDataError, match="no position"):
        ids(resumed({"lightning_dist.data": 1, "epoch": 0}, loader))


def test_batches_in_hand_do_not_count() -> None:
    """As where Lightning takes one ahead."""
    whole = ids(loader_of())
    loader = loader_of()
    loader.hold_back(lambda: 1)
    list(islice(iter(loader), 4))
    assert ids(resumed(loader.state_dict(), loader_of())) == whole[3:]


def test_what_was_taken_ahead_and_dropped_comes_again() -> None:
    """As where Lightning iterates twice at the start of an epoch, and says only in between which one it is."""
    whole, in_hand = passes(loader_of(), 3), [0]

    def taking_ahead(loader: ShardedLoader, count: int) -> ShardedLoader:
        loader.hold_back(lambda: in_hand[0])
        list(islice(iter(loader), count))
        in_hand[0] = 1
        return loader

    new = taking_ahead(loader_of(), 1)
    new.set_epoch(2)
    batches = iter(new)
    assert new.is_new
    in_hand[0] = 0  # Lightning has dropped it
    assert ids(batches) == whole[2]
    cut_short = taking_ahead(loader_of(), 4)
    assert not cut_short.is_new
    batches = iter(cut_short)
    in_hand[0] = 0
    assert ids(batches) == whole[1]
    endless = taking_ahead(loader_of(epoch="endless"), 4)
    batches = iter(endless)
    in_hand[0] = 0
    assert ids(batches)[:5] == flat(passes(loader_of(epoch="endless"), 1))[3:8]


def test_a_state_may_come_after_iter() -> None:
    whole = ids(loader_of())
    loader = loader_of()
    batches = iter(loader)
    loader.load_state_dict(after(loader_of(), 4))
    assert ids(batches) == whole[4:]


def test_a_loader_is_told_the_epoch_until_it_has_a_place_of_its_own() -> None:
    whole = passes(loader_of(), 3)
    new = loader_of()
    new.batch_sampler.sampler.set_epoch(2)
    assert ids(new) == whole[2]
    old = resumed(after(loader_of(), 4), loader_of())
    old.batch_sampler.sampler.set_epoch(2)
    assert ids(old) == whole[0][4:]


def test_an_epoch_that_was_cut_short_is_over() -> None:
    whole = passes(loader_of(), 2)
    cut = loader_of(workers=2)
    for batch in cut:
        assert ids_of(batch) == whole[0][0]
        break
    assert ids(cut) == whole[1]
    skipped = resumed(after(loader_of(), 4), loader_of())
    skipped.skip_rest()
    assert ids(skipped) == whole[1]


def test_two_iterations_at_a_time_are_refused() -> None:
    loader = loader_of()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(ConfigError, match="make a loader for each"):
        next(first)


# -- random numbers ---------------------------------------------------------------------------------------------------


def with_generator(sample: int, generator: np.random.Generator) -> tuple[int, float]:
    return sample, float(generator.random())


def with_globals(sample: int) -> tuple[int, float]:
    return sample, random.random() + float(np.random.random()) + float(torch.rand(()))


def drawn(loader: ShardedLoader) -> list[tuple[int, float]]:
    return [pair for batch in loader for pair in zip(batch[0].tolist(), batch[1].tolist(), strict=True)]


def states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("transform", [with_generator, with_globals])
@pytest.mark.parametrize("workers", [WORKERS["threads"][0], WORKERS["processes"][0]], ids=["threads", "processes"])
def test_draws_are_reproducible(transform: Callable[..., Any], workers: dict[str, Any]) -> None:
    make = partial(loader_of, parts={"transform": transform})
    before = states()
    loader = make()
    first, second = drawn(loader), drawn(loader)
    assert states() == before, "training's own generators are not touched"
    values = [value for _, value in first + second]
    assert len(set(values)) == len(values), "another number for each sample, in each epoch"
    other = resumed(after(make(), 4), make())
    assert drawn(other) == first[12:]
    if transform is with_generator or workers.get("readers") == "processes":
        busy = make(**workers)
        assert [drawn(busy), drawn(busy)] == [first, second]
        busy.close()
    assert states() == before
    replicas = [drawn(make(world_size=2, replica=replica)) for replica in range(2)]
    values = [value for each in replicas for _, value in each]
    assert len(set(values)) == len(values)
    if transform is with_generator:
        assert sorted(replicas[0] + replicas[1]) == sorted(first[: len(values)])


class Drawing(Ids):
    """A data set that draws by itself."""

    def __getitem__(self, index: int) -> Any:
        return with_globals(index)


def test_a_data_set_that_draws_is_seeded_too() -> None:
    before = states()
    assert drawn(loader_of(Drawing(9))) == drawn(loader_of(Drawing(9), readers="processes", workers=2))
    assert states() == before


def test_a_sample_that_comes_twice_draws_anew() -> None:
    """In an endless epoch's last batch, and where a mixture takes a small source again."""
    endless = loader_of(7, epoch="endless", batch_size=5, parts={"transform": with_generator})
    values = [value for _ in range(7) for _, value in drawn(endless)]
    assert len(set(values)) == len(values)
    mixed = loader_of([Source(Ids(3), weight=5.0), Source(Ids(9))], parts={"transform": with_generator})
    values = [value for _, value in drawn(mixed)]
    assert len(set(values)) == len(values)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def test_a_mixture_keeps_its_weights_and_resumes() -> None:
    def mixture(**options: Any) -> ShardedLoader:
        sources = [Source(Ids(40), weight=3.0), Source(Many(40), weight=1.0)]
        return loader_of(sources, parts={"epoch_samples": 48}, last_batch="short", **options)

    whole = ids(mixture())
    assert sum(sample >= 1000 for batch in whole for sample in batch) == pytest.approx(12, abs=2)
    assert ids(resumed(after(mixture(), 5), mixture(workers=2))) == whole[5:]
    state = after(mixture(), 6)
    two = [resumed(state, mixture(world_size=2, replica=replica)) for replica in range(2)]
    rest = [flat(step) for step in zip(*map(ids, two), strict=True)]
    assert sorted(flat(rest)) == sorted(flat(whole[6:]))


class Many(Ids):
    def __getitem__(self, index: int) -> int:
        return 1000 + index


# -- what cannot be read ----------------------------------------------------------------------------------------------


def torn(folder: Path) -> Path:
    """Four shards of three chunks; one has lost its end."""
    write_tokens_of(folder, [12, 12, 12, 12])
    path = folder / "shard-1.bin"
    path.write_bytes(path.read_bytes()[:-40])
    return folder


@pytest.mark.parametrize("workers", sampled(WORKERS, ["inline", "threads", "processes"]))
def test_a_torn_shard_is_an_error_that_names_it(tmp_path: Path, workers: dict[str, Any]) -> None:
    before = Snapshot.take()
    loader = loader_of(torn(tmp_path / "data"), **workers)
    with pytest.raises(UnreadableShardError, match=r"shard-1\.bin"):
        ids(loader)
    assert before.leaks() == [], "though the error, which is still held, has the workers in its traceback"


@pytest.mark.parametrize("workers", sampled(WORKERS, ["inline", "processes"]))
def test_or_others_take_its_place(tmp_path: Path, workers: dict[str, Any]) -> None:
    events = EventStream()
    loader = loader_of(torn(tmp_path / "data"), on_unreadable="skip", last_batch="short", **workers)
    loader.place(Replicas(), events)
    batches = ids(loader)
    skipped = sum(event.value for event in events.snapshot() if event.name == SKIPPED)
    taken = set(flat(batches))
    assert [len(batch) for batch in batches] == [3] * 16
    assert skipped == 48 - len(taken) > 0
    assert {sample for sample in range(48) if sample not in taken} <= set(range(12, 24))
    loader.close()


@pytest.mark.parametrize("workers", sampled(WORKERS, ["inline", "threads far", "processes far"]))
def test_where_a_whole_batch_cannot_be_read_others_are_the_same_each_time(
    tmp_path: Path, workers: dict[str, Any]
) -> None:
    """They do not depend on what was read before, so a run goes on also from a batch that has none of its own."""
    folder = torn(tmp_path / "data")
    options = {"on_unreadable": "skip", "lanes": 1, "shuffle_block": 1, "batch_size": 2}
    whole = ids(loader_of(folder, **options))
    assert len(whole) == 24
    assert set(flat(whole)) < set(range(48))
    for taken in (0, *range(1, 24, 1 if not workers else 7)):
        loader = resumed(after(loader_of(folder, **options), taken), loader_of(folder, **options, **workers))
        assert ids(loader) == whole[taken:]


def test_where_nothing_can_be_read_the_run_ends(tmp_path: Path) -> None:
    folder = write_tokens_of(tmp_path / "data", [12, 12])
    for path in folder.glob("*.bin"):
        path.unlink()
    with pytest.raises(UnreadableShardError, match="shard-"):
        ids(loader_of(folder, on_unreadable="skip"))


class Slow(Ids):
    def __getitem__(self, index: int) -> int:
        if index == 20:
            signal.pause()
        return index


@pytest.mark.sweep  # it takes torch 5 s to end a worker that does not listen
def test_a_reader_that_hangs_ends_in_an_error() -> None:
    loader = loader_of(Slow(29), workers=2, readers="processes", timeout_s=1.0)
    with pytest.raises(DataError, match="timed out"):
        ids(loader)


def test_an_error_in_a_transform_keeps_its_type() -> None:
    for workers in WORKERS.values():
        loader = loader_of(parts={"transform": broken}, **workers[0])
        with pytest.raises(ZeroDivisionError):
            ids(loader)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_a_thread_ends_the_run(error: BaseException) -> None:
    """Packages in Rust raise such too, when they panic."""

    def ending(sample: int) -> int:
        if sample == 20:
            raise error
        return sample

    before = Snapshot.take()
    with pytest.raises(DataError, match=type(error).__name__):
        ids(loader_of(parts={"transform": ending}, workers=2))
    assert before.leaks() == []
    with pytest.raises(type(error)):
        ids(loader_of(parts={"transform": ending}))


def broken(sample: int) -> float:
    return 1 / (sample - 20)


# -- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", sampled(WORKERS, ["threads lasting", "processes lasting"]))
@pytest.mark.parametrize("how", ["closed", "dropped", "dropped in the middle", "iterator dropped", "epoch over"])
def test_nothing_is_left(tmp_path: Path, workers: dict[str, Any], how: str) -> None:
    before = Snapshot.take()
    loader = loader_of(write_tokens_of(tmp_path / "data", [12, 12]), **workers)
    batches = iter(loader)
    next(batches)
    if how == "closed":
        loader.close()
        loader.close()
    elif how == "dropped":
        list(batches)
        del loader, batches
    elif how == "dropped in the middle":
        del loader, batches
    elif how == "iterator dropped":
        del batches
    else:
        list(batches)
        if workers.get("persistent"):
            assert before.leaks(grace_s=0.0) != []
            loader.close()
    gc.collect()
    assert before.leaks() == []


def test_a_process_that_is_started_anew_reads_alike(tmp_path: Path) -> None:
    """It is sent the reader, as pickled bytes."""
    folder = write_tokens_of(tmp_path / "data", [12])
    reader = BatchReader(
        [Source(folder)], transform=None, collate=default_collate, seed=0, replica=0, skips=False, seeds=False
    )
    chunks = np.array([0, 2, 1])
    plan = BatchPlan(0, np.arange(3), np.zeros(3, dtype=np.int64), chunks, np.arange(3))
    expected = reader(plan)
    again = pickle.loads(pickle.dumps(reader))
    assert torch.equal(again(plan).batch, expected.batch)
    for each in (reader, again):
        each.sources[0].close()


def test_a_forked_process_reads_by_itself(tmp_path: Path) -> None:
    """What is open belongs to the process that opened it."""
    before = Snapshot.take()
    loader = loader_of(write_tokens_of(tmp_path / "data", [12, 12]))
    whole = ids(loader)
    again = pickle.loads(pickle.dumps(loader_of(tmp_path / "data")))
    assert ids(again) == whole
    loader.close()
    again.close()
    assert before.leaks() == []


def test_loaders_may_share_a_source(tmp_path: Path) -> None:
    """What one of them closes, the other reads on from."""
    source = Source(write_tokens_of(tmp_path / "data", [12, 12]))
    one, other = loader_of(source, workers=2), loader_of(source)
    whole = ids(other)
    batches = iter(one)
    got = ids([next(batches)])
    other.close()
    assert got + ids(batches) == whole


# -- events -----------------------------------------------------------------------------------------------------------


def test_waiting_and_reading_are_recorded(tmp_path: Path) -> None:
    for workers in WORKERS.values():
        events = EventStream()
        loader = loader_of(**workers[0])
        loader.place(Replicas(), events)
        assert len(list(loader)) == 9
        loader.close()
        spans = [event for event in events.snapshot() if event.name == WAIT]
        assert [event.attributes["samples"] for event in spans] == [3] * 9
        assert all(event.kind is EventKind.SPAN and event.attributes["read_s"] > 0 for event in spans)
        if workers[0].get("readers") == "processes":
            assert all("ready" not in event.attributes for event in spans)
        else:
            assert all(event.attributes["ready"] >= 0 for event in spans)


@pytest.mark.parametrize("workers", sampled(WORKERS, ["inline", "threads", "processes"]))
def test_bytes_from_shared_storage_are_counted(tmp_path: Path, workers: dict[str, Any]) -> None:
    write_tokens_of(tmp_path / "data", [12, 12])
    store = fsspec.filesystem("memory")
    for path in (tmp_path / "data").iterdir():
        store.pipe(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    events = EventStream()
    loader = loader_of(f"memory://{tmp_path.name}", cache_dir=str(tmp_path / "cache"), last_batch="short", **workers)
    loader.place(Replicas(), events)
    sizes = sum(path.stat().st_size for path in (tmp_path / "data").glob("*.bin"))
    read = []
    for _ in range(2):
        assert sorted(flat(ids(loader))) == list(range(24))
        loader.close()
        read.append(total(events, "data.shared_bytes"))
        events.clear()
    store.rm(f"/{tmp_path.name}", recursive=True)
    assert sizes <= read[0] <= 1.1 * sizes, "a token at the end of a chunk is that of the next"
    assert read[1] == 0


def total(events: EventStream, name: str) -> float:
    return sum(event.value for event in events.snapshot() if event.name == name)


# -- errors before training -------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="role"):
        loader_of(role="training")
    with pytest.raises(ConfigError, match=r"\[Source\('a'\), ...\]"):
        loader_of(["a", "b"])
    with pytest.raises(ConfigError, match="no samples"):
        len(loader_of(0))
    with pytest.raises(ConfigError, match="2 samples are too few for 3 replicas"):
        len(loader_of(2, world_size=3, role="evaluate"))
    with pytest.raises(ConfigError, match="less than one batch of 9"):
        len(loader_of(8, world_size=3))
    for none in (iter([1, 2]), None, 3.5):
        with pytest.raises(ForeignDataError, match="no length"):
            Source(none)
    with pytest.raises(DataError, match="nowhere"):
        len(loader_of(tmp_path / "nowhere"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.xyz").write_text("?")
    with pytest.raises(ForeignDataError, match="other"):
        len(loader_of(tmp_path / "other"))
    with pytest.raises(ConfigError, match="format"):
        len(loader_of(Source(tmp_path, format="parket")))
    with pytest.raises(ConfigError, match="are of folders"):
        Source(Ids(3), format="tokens")
    with pytest.raises(ConfigError, match="empty name"):
        Source("")


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), "2", True])
def test_weights_are_positive_numbers(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"a Source has the weight .*leave out a source"):
        Source(Ids(3), weight=weight)


@pytest.mark.parametrize(
    ("data", "said"),
    [([], "at least one Source"), ((), "at least one Source"), ({"a": Ids(3)}, r"names \(a\)")],
    ids=["list", "tuple", "mapping"],
)
def test_no_data_and_names_are_refused_when_a_loader_is_made(data: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ShardedLoader(data)
    with pytest.raises(ConfigError, match=said):
        ShardedDataModule(data)
    ShardedDataModule(val={"a": Ids(3)})


def test_hosts_that_read_shards_of_others_are_told(tmp_path: Path) -> None:
    write_tokens_of(tmp_path / "data", [12, 12])
    store = fsspec.filesystem("memory")
    for path in (tmp_path / "data").iterdir():
        store.pipe(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    remote, hosts = f"memory://{tmp_path.name}", Replicas((0, 1, 2), 0)
    loader = ShardedLoader(remote, config=DataConfig(batch_size=2, lanes=4))
    loader.place(hosts)
    with pytest.warns(UserWarning, match=r"write data\.lanes=6"):
        assert len(loader) == 4
    for data, lanes in ((remote, 6), (tmp_path / "data", 4)):
        loader = ShardedLoader(data, config=DataConfig(batch_size=2, lanes=lanes))
        loader.place(hosts)
        assert len(loader) == 4
    store.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("kind", [ShardedLoader, ShardedDataModule])
def test_options_are_a_config_or_a_mapping(kind: Any) -> None:
    assert kind(Ids(9), config={"batch_size": 3}).config == DataConfig(batch_size=3)
    with pytest.raises(UnknownOptionError, match="batch_size"):
        kind(Ids(9), config={"batchsize": 3})
    with pytest.raises(ConfigError, match="data must be a DataConfig or a mapping of its options, got str"):
        kind(Ids(9), config="shuffled")


def test_text_of_a_data_module_opens_nothing() -> None:
    module = ShardedDataModule([Source("gone/a", weight=3), Source(Ids(9))], val={"b": "gone/b"}, test=Ids(9))
    assert str(module) == "ShardedDataModule(train=[gone/a, Ids], val={b: gone/b}, test=Ids)"
