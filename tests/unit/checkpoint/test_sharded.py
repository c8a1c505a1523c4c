"""What was saved by any ranks in any layout is loaded into any other; every byte that changed is found."""

from __future__ import annotations

import collections
import os
import random
from pathlib import Path

import pytest
import torch

from lightning_dist.checkpoint.catalog import newest, open_checkpoint
from lightning_dist.checkpoint.host_pieces import Held, HostPiece, TiedTo, bytes_of
from lightning_dist.checkpoint.pieces import Piece
from lightning_dist.checkpoint.save_planner import SharedSavePlanner
from lightning_dist.checkpoint.sharded import load, save
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import CheckpointError, DamagedCheckpointError, StateMismatchError
from tests.support.saves import dealt, every_type, load_on_rank, same, save_by_ranks, tiling, zeros_like


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
def test_every_type_comes_back_to_the_bit(tmp_path: Path, chunk_bytes: int) -> None:
    state = every_type()
    folder = open_folder(tmp_path / "c")
    save({**state}, folder, rank=0, host="h", chunk_bytes=chunk_bytes)
    target = zeros_like(state)
    load(target, folder)
    assert [name for name, value in state.items() if not same(value, target[name])] == []


@pytest.mark.parametrize("seed", range(20))
def test_random_layouts_load_into_random_layouts(seed: int) -> None:
    rng = random.Random(seed)
    folder = open_folder(f"memory://layouts/{seed}")
    shapes = [(13,), (7, 5), (3, 4, 5), (), (0, 3), (17, 2)]
    wholes = {
        f"w{i}": torch.randn(shape).to(rng.choice([torch.float32, torch.bfloat16])) for i, shape in enumerate(shapes)
    }
    world_size = rng.randint(1, 6)
    parts = {name: dealt(name, whole, world_size, rng) for name, whole in wholes.items()}
    states = [{name: parts[name][rank] for name in wholes} for rank in range(world_size)]
    manifest = save_by_ranks(states, folder, chunk_bytes=rng.choice([8, 33, 4096]))
    assert sum(entry.size_bytes for entry in manifest.tensors.values()) == sum(t.nbytes for t in wholes.values())
    open_checkpoint(folder, full=True)
    targets = {}
    for name, whole in wholes.items():
        dtype, pieces = str(whole.dtype).removeprefix("torch."), []
        for offsets, sizes in tiling(tuple(whole.shape), 4, rng):
            piece = Piece(name, dtype, tuple(whole.shape), offsets, sizes)
            # Into a part of something larger: not contiguous.
            wide = (
                torch.zeros(*sizes[:-1], sizes[-1] + 3, dtype=whole.dtype)
                if sizes
                else torch.zeros((), dtype=whole.dtype)
            )
            pieces.append(HostPiece(piece, wide[..., 1 : sizes[-1] + 1] if sizes else wide))
        targets[name] = Held(tuple(pieces))
    load_on_rank(dict(targets), folder)
    for name, whole in wholes.items():
        source = HostPiece(Piece.whole(name, targets[name].pieces[0].piece.dtype, whole.shape), whole)
        assert all(same(part.data, source.part(part.piece)) for part in targets[name].pieces), name


def test_what_all_ranks_hold_is_written_by_all_and_once() -> None:
    folder = open_folder("memory://shared")
    state = {f"w{i}": torch.randn(100, 10) for i in range(8)}
    manifest = save_by_ranks([{**state} for _ in range(4)], folder, chunk_bytes=2000)
    sizes = [entry.size for entry in manifest.files.values()]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 2000
    assert sum(sizes) <= 1.05 * sum(t.nbytes for t in state.values())
    assert {entry.host for entry in manifest.files.values()} == {"host0", "host1"}


def test_tied_tensors_are_stored_once_and_views_drag_no_storage() -> None:
    folder = open_folder("memory://tied")
    weight = torch.randn(50, 8)
    state = {"embedding": weight, "head": weight, "row": torch.randn(1000, 1000)[3], "again": TiedTo("embedding")}
    manifest = save_by_ranks([{**state}], folder)
    assert manifest.aliases == {"head": "embedding", "again": "embedding"}
    assert manifest.size_bytes <= weight.nbytes + 4000 + 128
    target = {name: torch.zeros(50, 8) for name in ("head", "again")}
    load_on_rank(target, folder)
    assert same(target["head"], weight)
    assert same(target["again"], weight)


def test_a_tensor_that_is_tied_on_some_ranks_only_is_stored() -> None:
    folder = open_folder("memory://half-tied")
    weight, other = torch.ones(4), torch.full((4,), 2.0)
    manifest = save_by_ranks([{"a": weight, "b": weight}, {"b": other}], folder)
    assert manifest.aliases == {}
    part = Held((HostPiece(Piece("b", "float32", (4,), (4,), (0,)), torch.empty(0)),))
    manifest = save_by_ranks([{"a": weight, "b": weight}, {"b": part}], folder)
    assert manifest.aliases == {"b": "a"}, "a rank with no part of it has no say"
    with pytest.raises(CheckpointError, match="'b' is tied to 'gone', which no rank holds"):
        save_by_ranks([{"b": TiedTo("gone")}], folder)


def test_objects_come_back_and_belong_to_ranks() -> None:
    folder = open_folder("memory://objects")
    states = [{"loops": {"step": 3}, f"rng/{rank}": torch.arange(rank + 1)} for rank in range(3)]
    manifest = save_by_ranks([{**state} for state in states], folder)
    assert sorted(manifest.tensors) == ["rng/0", "rng/1", "rng/2"]
    target = load_on_rank({"loops": None, "rng/2": torch.zeros(3, dtype=torch.int64)}, folder)
    assert target["loops"] == {"step": 3}
    assert target["rng/2"].tolist() == [0, 1, 2]


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "c")
    save({"a": torch.ones(3, 2), "b": torch.ones(2), "o": {"x": 1}, "t": torch.ones(1)}, folder, rank=0, host="h")
    wrong = {"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.int64), "o": torch.ones(1), "t": None, "c": None}
    with pytest.raises(StateMismatchError) as caught:
        load(wrong, folder)
    for line in (
        "a: saved float32[3, 2], here float32[2, 3]",
        "b: saved float32[2], here int64[2]",
        "o: is an object in the checkpoint, no tensor",
        "t: is a tensor in the checkpoint",
        "c: is not in the checkpoint",
    ):
        assert line in str(caught.value)
    many = {f"n{i}": None for i in range(50)}
    with pytest.raises(StateMismatchError, match="and 30 more"):
        load(many, folder)


def test_parts_that_nobody_holds_or_two_hold_apart_are_refused() -> None:
    folder = open_folder("memory://holes")

    def part(first: int, size: int) -> Held:
        return Held((HostPiece(Piece("w", "float32", (10,), (first,), (size,)), torch.ones(size)),))

    with pytest.raises(CheckpointError, match=r"'w' \[10\] .* blocks hold 9 of 10 values"):
        save_by_ranks([{"w": part(0, 4)}, {"w": part(5, 5)}], folder)
    with pytest.raises(CheckpointError, match=r"\[0:6\] and \[5:10\] overlap"):
        save_by_ranks([{"w": part(0, 6)}, {"w": part(5, 5)}], folder, chunk_bytes=1000)
    with pytest.raises(CheckpointError, match="ranks disagree on tensor 'w'"):
        save_by_ranks([{"w": torch.ones(2)}, {"w": torch.ones(3)}], folder)
    with pytest.raises(CheckpointError, match="'w' is a tensor on one rank and an object on another"):
        save_by_ranks([{"w": torch.ones(2)}, {"w": 3}], folder)
    assert folder.list() == {}


def test_saving_does_not_copy_what_is_contiguous() -> None:
    tensor = torch.randn(5, 4)
    assert torch.frombuffer(bytes_of(tensor), dtype=torch.float32).data_ptr() == tensor.data_ptr()
    planner = SharedSavePlanner(chunk_bytes=16)
    planner.set_up_planner({"w": tensor})
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    pointers = [planner.resolve_data(item).data_ptr() for item in plans[0].items]  # type: ignore[union-attr]
    assert pointers == [tensor.data_ptr() + 16 * i for i in range(5)]


def test_each_rank_reads_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_dist.checkpoint.local_disk import LocalFolder

    whole = torch.randn(64, 1024)
    save({"w": whole, "other": torch.randn(64, 1024)}, open_folder(tmp_path), rank=0, host="h", chunk_bytes=1 << 16)
    read: list[int] = []
    true_read = LocalFolder.read_into
    monkeypatch.setattr(
        LocalFolder, "read_into", lambda s, n, start, target: (read.append(len(target)), true_read(s, n, start, target))
    )
    part = Held((HostPiece(Piece("w", "float32", (64, 1024), (20, 0), (2, 1024)), torch.zeros(2, 1024)),))
    load({"w": part}, open_folder(tmp_path))
    assert same(part.pieces[0].data, whole[20:22])
    assert sum(read) == 1 << 16, "one chunk"


def test_a_thousand_flipped_bits_are_all_found(tmp_path: Path) -> None:
    """Anywhere in any file of the checkpoint: by the full check, and where it is read, by loading."""
    rng = random.Random(5)
    state = {**every_type(), "loops": {"step": 3}}
    folder = open_folder(tmp_path / "c")
    save_by_ranks([{**state} for _ in range(3)], folder)
    files = [tmp_path / "c" / name for name in folder.list()]
    sizes = [path.stat().st_size for path in files]
    flipped: collections.Counter[str] = collections.Counter()
    for _ in range(1000):
        path = files[rng.choices(range(len(files)), sizes)[0]] if rng.random() < 0.7 else rng.choice(files)
        bit = rng.randrange(8 * path.stat().st_size)
        with open(path, "rb+", buffering=0) as file:
            good = os.pread(file.fileno(), 1, bit // 8)
            os.pwrite(file.fileno(), bytes([good[0] ^ 1 << bit % 8]), bit // 8)
            # A marker with another digit vouches for another manifest.
            named = "COMMITTED|manifest-" if path.name == "COMMITTED" else path.name
            with pytest.raises(CheckpointError, match=named):
                open_checkpoint(folder, full=True)
            os.pwrite(file.fileno(), good, bit // 8)
            flipped[path.name.partition("-")[0]] += 1
    open_checkpoint(folder, full=True)
    print(f"\n{flipped.total()} of 1000 flipped bits were found: {dict(sorted(flipped.items()))}")


def test_a_flipped_bit_of_a_tensor_is_found_by_loading_it(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "c")
    manifest = save_by_ranks([{"a": torch.randn(1000), "b": torch.randn(3)}], folder, chunk_bytes=512)
    place = manifest.tensors["a"].chunks[3].place
    path = tmp_path / "c" / place.file
    data = bytearray(path.read_bytes())
    data[place.start + 5] ^= 4
    path.write_bytes(data)
    load({"b": torch.zeros(3)}, folder)
    with pytest.raises(DamagedCheckpointError, match=rf"{place.file}: bytes {place.start} to .* \(tensor a\)"):
        load({"a": torch.zeros(1000)}, folder)
    open_checkpoint(folder)
    with pytest.warns(UserWarning, match=f"skipped: .*{place.file} is not what was written"):
        assert newest(open_folder(tmp_path), full=True) is None
