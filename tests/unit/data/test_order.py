"""The order of one data set."""

from __future__ import annotations

import hashlib
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.data.order.sample_order import Located, Order, OrderOptions, sections
from lightning_dist.errors import ConfigError

chunk_counts = st.lists(st.integers(0, 30), min_size=1, max_size=30)
options = st.builds(
    OrderOptions,
    seed=st.integers(0, 2**70),
    lanes=st.integers(1, 30),
    shuffle_block=st.integers(1, 40),
    shuffle=st.booleans(),
)


def pairs(located: Located) -> list[tuple[int, int]]:
    return list(zip(located.chunks.tolist(), located.samples.tolist(), strict=True))


def in_files(counts: list[int]) -> list[tuple[int, int]]:
    return [(chunk, sample) for chunk, count in enumerate(counts) for sample in range(count)]


def epoch_of(order: Order, epoch: int) -> Located:
    return order.locate(epoch, np.arange(order.num_samples))


@settings(deadline=None)
@given(counts=chunk_counts, options=options, epoch=st.integers(0, 2**40))
def test_each_sample_comes_once_an_epoch(counts: list[int], options: OrderOptions, epoch: int) -> None:
    order = Order(np.array(counts), options, source=3)
    located = epoch_of(order, epoch)
    assert sorted(pairs(located)) == in_files(counts)
    assert located.sources.tolist() == [3] * sum(counts)


@settings(deadline=None)
@given(counts=chunk_counts, options=options, data=st.data())
def test_any_position_is_found_on_its_own_in_any_epoch(
    counts: list[int], options: OrderOptions, data: st.DataObject
) -> None:
    counts = [*counts, 1]
    order, size = Order(np.array(counts), options), sum(counts)
    epochs = [pairs(epoch_of(order, epoch)) for epoch in range(3)]
    numbers = data.draw(st.lists(st.integers(0, 3 * size - 1), max_size=20))
    expected = [epochs[number // size][number % size] for number in numbers]
    found = order.locate(1, np.array(numbers, dtype=np.int64) - size)  # before the epoch, in it, and after it
    assert pairs(found) == expected


def test_it_follows_seed_and_epoch_only() -> None:
    counts = np.full(50, 20)
    order = Order(counts, OrderOptions(seed=1))
    assert pairs(epoch_of(order, 0)) == pairs(epoch_of(Order(counts, OrderOptions(seed=1)), 0))
    assert pairs(epoch_of(pickle.loads(pickle.dumps(order)), 5)) == pairs(epoch_of(order, 5))
    different = [
        epoch_of(order, 0),
        epoch_of(order, 1),
        epoch_of(Order(counts, OrderOptions(seed=2)), 0),
        epoch_of(Order(counts, OrderOptions(seed=1), source=1), 0),
        epoch_of(Order(counts, OrderOptions(seed=1, lanes=12)), 0),
        epoch_of(Order(counts, OrderOptions(seed=1, shuffle_block=7)), 0),
    ]
    assert len({tuple(pairs(located)) for located in different}) == len(different)


def test_file_order() -> None:
    counts = [3, 0, 2, 4]
    assert pairs(epoch_of(Order(np.array(counts), OrderOptions(seed=0, lanes=1, shuffle=False)), 7)) == in_files(counts)
    dealt = epoch_of(Order(np.array([10]), OrderOptions(seed=0, lanes=4, shuffle=False)), 0)
    # lanes of 3, 3, 2 and 2 samples; 0 and 2 are the first half, 1 and 3 the second
    assert dealt.samples.tolist() == [0, 5, 3, 8, 1, 6, 4, 9, 2, 7]


@pytest.mark.parametrize("counts", [[1], [0, 0, 1, 0], [2, 2, 2]])
@pytest.mark.parametrize("lanes", [1, 3, 24])
def test_few_samples(counts: list[int], lanes: int) -> None:
    assert sorted(pairs(epoch_of(Order(np.array(counts), OrderOptions(seed=0, lanes=lanes)), 0))) == in_files(counts)


def test_no_samples() -> None:
    order = Order(np.array([0, 0]), OrderOptions(seed=0))
    assert pairs(epoch_of(order, 0)) == []
    with pytest.raises(ValueError, match="an order of 0 samples has no sample number 0"):
        order.locate(0, np.array([0]))
    with pytest.raises(ValueError, match="an order of 3 samples has no sample number -1"):
        Order(np.array([3]), OrderOptions(seed=0)).locate(0, np.array([2, -1]))


def test_a_lane_reads_few_chunks_at_a_time() -> None:
    lanes, block = 6, 50
    order = Order(np.full(40, 100), OrderOptions(seed=3, lanes=lanes, shuffle_block=block))
    chunks = epoch_of(order, 0).chunks[: 4000 // lanes * lanes].reshape(-1, lanes)
    for lane in range(lanes):
        read = chunks[:, lane]
        blocks = [read[start : start + block] for start in range(0, len(read), block)]
        assert max(len(np.unique(each)) for each in blocks) <= 2
        assert len(np.unique(read)) <= 4000 // lanes // 100 + 2
        for chunk in np.unique(read):  # it is not come back to
            seen = [number for number, each in enumerate(blocks) if chunk in each]
            assert seen == list(range(seen[0], seen[-1] + 1))


def test_each_block_of_each_lane_is_permuted_by_itself() -> None:
    order = Order(np.full(8, 30), OrderOptions(seed=0, lanes=4, shuffle_block=30))
    samples = [epoch_of(order, epoch).samples.reshape(60, 4).T.reshape(8, 30) for epoch in (0, 1)]
    permutations = {tuple((block - block.min()).tolist()) for blocks in samples for block in blocks}
    assert {tuple(sorted(each)) for each in permutations} == {tuple(range(30))}
    assert len(permutations) == 16


@pytest.mark.parametrize(
    ("samples", "block", "at_once"), [(30, 30, 1), (30, 31, 1), (30, 1, 1), (30, 90, 3), (30, 70, 2)]
)
def test_a_block_is_a_chunk_or_several(samples: int, block: int, at_once: int) -> None:
    order = Order(np.full(48, samples), OrderOptions(seed=0, lanes=4, shuffle_block=block))
    chunks = epoch_of(order, 1).chunks.reshape(12 * samples, 4)
    for lane in range(4):
        if block != 70:
            runs = chunks[:, lane].reshape(-1, at_once * samples)
            assert {len(np.unique(run)) for run in runs} == {at_once}
        assert len(np.unique(chunks[: samples // 2, lane])) >= at_once  # mixed from its start
        assert len(np.unique(chunks[: samples * at_once, lane])) == at_once


def test_setting_up_does_not_grow_with_samples() -> None:
    def peak_bytes(samples_per_chunk: int) -> int:
        counts = np.full(100_000, samples_per_chunk)
        tracemalloc.start()
        try:
            order = Order(counts, OrderOptions(seed=0))
            middle = order.locate(3, order.num_samples // 2 + np.arange(256))
            assert middle.samples.max() < samples_per_chunk
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak_bytes(10), peak_bytes(10**10)
    assert many < 20e6  # of 10^5 chunks at 8 bytes: fewer than 25 such columns at a time
    assert many < 1.2 * few


def test_at_most_a_few_epochs_are_kept() -> None:
    order = Order(np.full(100_000, 2), OrderOptions(seed=0))
    tracemalloc.start()
    try:
        for epoch in range(20):
            order.locate(epoch, np.arange(4))
        assert tracemalloc.get_traced_memory()[0] < 6 * 4 * 8 * 100_000  # of 4 epochs, with four columns each
    finally:
        tracemalloc.stop()


def line_of(order: Order, counts: Numbers, located: Located) -> Numbers:
    """Numbers of samples as their files have them."""
    return (np.cumsum(counts) - counts)[located.chunks] + located.samples


def test_samples_are_mixed_within_blocks_and_over_lanes() -> None:
    counts = np.full(480, 500)
    order = Order(counts, OrderOptions(seed=1, shuffle_block=1000))
    lines = line_of(order, counts, epoch_of(order, 0))
    size = order.num_samples
    # Neighbours of the order come from unlike places of the data.
    assert abs(np.corrcoef(lines[:-1], lines[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(lines, np.arange(size))[0, 1]) < 0.05
    # Neighbours of a lane come from anywhere in a chunk.
    lane = epoch_of(order, 0).samples[::24]
    assert abs(np.corrcoef(lane[:-1], lane[1:])[0, 1]) < 0.05
    # A batch of 96 is of all 24 lanes, and of as many chunks or more; its mean is that of the data, up to chance.
    batches = np.sort((lines // 500).reshape(-1, 96), axis=1)
    assert ((np.diff(batches, axis=1) > 0).sum(axis=1) + 1).min() >= 22
    deviation = size / 12**0.5 / 24**0.5  # of the mean of 24 even numbers
    assert np.abs(lines.reshape(-1, 96).mean(axis=1) - size / 2).max() < 4.5 * deviation


def test_lanes_of_a_host_lie_side_by_side() -> None:
    assert sections(6).tolist() == [0, 3, 1, 4, 2, 5]
    assert sections(24).tolist() == [
        0,
        12,
        6,
        18,
        3,
        15,
        9,
        21,
        1,
        13,
        7,
        19,
        4,
        16,
        10,
        22,
        2,
        14,
        8,
        20,
        5,
        17,
        11,
        23,
    ]
    for lanes, hosts in ((24, 2), (24, 4), (24, 8), (24, 24), (9, 3), (30, 6), (7, 7)):
        found = sections(lanes)
        assert sorted(found) == list(range(lanes))
        for host in range(hosts):
            of_host = np.sort(found[host::hosts])
            assert of_host.tolist() == list(range(of_host[0], of_host[0] + lanes // hosts))


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("epoch", [0, 1])
def test_few_chunks_are_read_by_two_hosts(hosts: int, epoch: int) -> None:
    order = Order(np.full(1000, 37), OrderOptions(seed=5))
    numbers = np.arange(order.num_samples) + epoch * order.num_samples
    located = order.locate_numbers(numbers)
    readers = np.zeros((1000, hosts), dtype=bool)
    readers[located.chunks, numbers % hosts] = True
    shared = int((readers.sum(axis=1) > 1).sum())
    borders = hosts - 1 if hosts in (1, 2, 4, 8) else 23
    assert shared <= borders


@pytest.mark.parametrize("num_samples", [4800, 4801, 4817])
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_a_host_reads_the_same_chunks_in_every_epoch(num_samples: int, hosts: int) -> None:
    samples = np.full(200, 24)
    samples[7] += num_samples - samples.sum()
    order = Order(samples, OrderOptions(seed=5, shuffle_block=64))
    read = []
    for epoch in range(4):
        numbers = np.arange(order.num_samples) + epoch * order.num_samples
        located = order.locate_numbers(numbers)
        read.append([set(located.chunks[numbers % hosts == host].tolist()) for host in range(hosts)])
    for host in range(hosts):
        every = set.union(*(epoch[host] for epoch in read))
        # What lies at a border of lanes may move over it: by less than 24 samples, so by one chunk at each end.
        borders = 0 if num_samples == 4800 else 2 if hosts in (2, 4) else 2 * 24 // hosts
        assert all(len(every - epoch[host]) <= borders for epoch in read)


def test_the_order_within_a_lane_changes_with_the_epoch() -> None:
    order = Order(np.full(200, 24), OrderOptions(seed=5, shuffle_block=8))
    first, second = (order.locate(epoch, np.arange(0, order.num_samples, 24)).chunks for epoch in (0, 1))
    assert set(first.tolist()) == set(second.tolist())
    assert list(dict.fromkeys(first.tolist())) != list(dict.fromkeys(second.tolist()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"seed": 0, "lanes": 0}, "lanes=0 lanes: must be between 1 and 65536 lanes"),
        ({"seed": 0, "shuffle_block": 0}, "shuffle_block=0 samples: must be at least 1 samples"),
        ({"seed": 0, "shuffle": "false"}, r"order.shuffle='false' \(str\): must be true or false"),
    ],
)
def test_options_are_checked(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OrderOptions(**given)  # type: ignore[arg-type]


def test_it_never_changes() -> None:
    order = Order(np.array([5, 0, 7, 3, 4]), OrderOptions(seed=7, lanes=4, shuffle_block=3))
    assert pairs(epoch_of(order, 0)) == [
        (2, 0),
        (2, 6),
        (2, 5),
        (0, 2),
        (4, 2),
        (0, 0),
        (2, 1),
        (0, 4),
        (4, 0),
        (3, 2),
        (2, 3),
        (0, 1),
        (4, 1),
        (3, 1),
        (2, 4),
        (0, 3),
        (4, 3),
        (3, 0),
        (2, 2),
    ]
    assert pairs(epoch_of(order, 1)) == [
        (0, 1),
        (2, 0),
        (3, 1),
        (2, 4),
        (0, 3),
        (4, 0),
        (3, 0),
        (2, 2),
        (0, 4),
        (4, 3),
        (3, 2),
        (2, 3),
        (0, 2),
        (4, 2),
        (2, 5),
        (2, 1),
        (0, 0),
        (4, 1),
        (2, 6),
    ]
    large = Order(np.arange(1000), OrderOptions(seed=123456789))
    digest = hashlib.blake2b(digest_size=8)
    for column in large.locate(9, np.arange(0, large.num_samples, 17)):
        digest.update(column.astype("<i8").tobytes())
    assert digest.hexdigest() == "57baefac97cd275e"
