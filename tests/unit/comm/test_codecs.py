"""What each codec promises: bytes, errors, what becomes of values at the edges of types."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist import config
from lightning_dist.comm.codecs import CODECS, Codec, chunk_bytes_of, codec_of
from lightning_dist.comm.codecs.codec import store
from lightning_dist.comm.codecs.dither import dither, seed_of, shift
from lightning_dist.comm.codecs.topk import TopkCodec
from lightning_dist.config import SyncConfig
from lightning_dist.errors import UnknownOptionError

WAYS = {
    "bf16": SyncConfig(codec="bf16"),
    "int8": SyncConfig(codec="int8"),
    "stochastic": SyncConfig(codec="int8", rounding="stochastic"),
    "onebit": SyncConfig(codec="onebit"),
    "topk": SyncConfig(codec="topk", ratio=0.05),
}
LENGTHS = [0, 1, 2, 7, 8, 9, 255, 256, 257, 1000, 4099]
LARGEST = torch.finfo(torch.float32).max
CPU = torch.device("cpu")


def opened(way: str) -> Codec:
    codec = codec_of(WAYS[way])
    assert codec is not None
    return codec


def noise(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=generator)
    return values * torch.logspace(-6, 6, max(1, length))[:length]


def there_and_back(codec: Codec, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(values, seed=seed), values.shape[1])


# -- all of them


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_are_as_many_as_claimed_and_rows_are_apart(way: str, rows: int, length: int) -> None:
    codec, values = opened(way), noise(rows, length)
    encoded = codec.encode(values, seed=3)
    assert encoded.dtype is torch.uint8
    assert encoded.shape == (rows, codec.encoded_bytes(length))
    assert encoded.is_contiguous()
    assert codec.encoded_bytes(length) % 4 == 0
    decoded = codec.decode(encoded, length)
    assert decoded.shape == values.shape
    assert decoded.dtype is torch.float32
    for row in range(rows):
        alone = there_and_back(codec, values[row : row + 1], seed=3)
        if way != "stochastic":  # whose numbers go by place
            assert torch.equal(decoded[row : row + 1], alone)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_values_and_seed_give_the_same_bytes_wherever_they_lie(way: str) -> None:
    codec, values = opened(way), noise(2, 1000)
    assert torch.equal(codec.encode(values, seed=5), codec.encode(values.t().contiguous().t(), seed=5))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [5, 300, 4099])
def test_what_has_been_decoded_is_near(way: str, length: int) -> None:
    """Never farther than zero would be; so that what feedback keeps does not grow by itself."""
    values = noise(1, length)
    error = (there_and_back(opened(way), values) - values).double().norm()
    assert error < values.double().norm()


@pytest.mark.parametrize("way", WAYS)
def test_zeros_stay_zeros(way: str) -> None:
    assert torch.equal(there_and_back(opened(way), torch.zeros(2, 600)), torch.zeros(2, 600))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_what_is_not_finite_is_still_seen(way: str, poison: float, place: int) -> None:
    values = noise(2, 600)
    values[1, place] = poison
    decoded = there_and_back(opened(way), values)
    assert decoded[0].isfinite().all(), "another row is not touched"
    assert not decoded[1, place].isfinite()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "bf16"])
@pytest.mark.parametrize("size", [LARGEST, 1e-38, 1e-45])
def test_the_largest_and_the_smallest_stay_finite(way: str, size: float) -> None:
    values = torch.full((1, 600), size)
    values[0, ::2] *= -1
    decoded = there_and_back(opened(way), values)
    assert decoded.isfinite().all()
    assert decoded.abs().max() <= values.abs().max() * 1.01 + 1e-45


@pytest.mark.parametrize("way", [way for way in WAYS if way != "bf16"])
def test_values_at_the_edge_of_fp16_stay_finite_there(way: str) -> None:
    edge = torch.finfo(torch.float16).max
    values = torch.full((1, 600), edge)
    out = torch.empty(600, dtype=torch.float16)
    store(there_and_back(opened(way), values)[0], out)
    assert out.isfinite().all()
    store(torch.tensor([2 * edge, -2 * edge]), out[:2])
    assert out[:2].tolist() == [edge, -edge]
    store(torch.tensor([math.nan, 1.0]), out[:2])
    assert out[0].isnan()
    assert out[1] == 1


@pytest.mark.parametrize(
    ("way", "applies"),
    [
        ("bf16", [torch.float64, torch.float32]),
        ("int8", [torch.float64, torch.float32, torch.float16, torch.bfloat16]),
        ("onebit", [torch.float64, torch.float32, torch.float16, torch.bfloat16]),
        ("topk", [torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    ],
)
def test_a_codec_applies_where_it_saves(way: str, applies: list[torch.dtype]) -> None:
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
    assert [dtype for dtype in types if opened(way).applies_to(dtype)] == applies


def test_names_of_codecs() -> None:
    assert tuple(CODECS) == config.CODECS
    assert codec_of(SyncConfig()) is None
    with pytest.raises(UnknownOptionError, match="allowed: same, bf16"):
        SyncConfig(codec="bf61")


@pytest.mark.parametrize(("way", "factor"), [("bf16", 2), ("int8", 3.9), ("onebit", 28), ("topk", 9.9)])
def test_how_many_times_fewer_bytes_than_fp32(way: str, factor: float) -> None:
    assert 4 * 100_000 / opened(way).encoded_bytes(100_000) >= factor
    assert 4 * 100_000 / opened(way).encoded_bytes(100_000) < factor * 1.02


@pytest.mark.parametrize(
    ("sync", "messages", "chunk_bytes"),
    [
        (SyncConfig(), 8, 2 << 20),
        (SyncConfig(codec="int8"), 4, 2 << 20),  # 130 KiB a message
        (SyncConfig(codec="int8"), 16, 4 << 20),
        (SyncConfig(codec="onebit"), 4, 8 << 20),
        (SyncConfig(codec="topk"), 4, 8 << 20),  # no larger than a bucket
        (SyncConfig(codec="topk", bucket_bytes=64 << 20), 4, 16 << 20),
        (SyncConfig(codec="topk", bucket_bytes=4096, chunk_bytes=8192), 4, 8192),
    ],
)
def test_chunks_grow_until_their_messages_are_not_small(sync: SyncConfig, messages: int, chunk_bytes: int) -> None:
    assert chunk_bytes_of(sync, messages=messages) == chunk_bytes


# -- each


def test_bf16_rounds_to_nearest_even() -> None:
    codec = opened("bf16")
    values = torch.tensor([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.14159, 7.0]])
    encoded = codec.encode(values)
    decoded = codec.decode(encoded, 5)
    assert decoded[0, :3].tolist() == [1.0, 1.0, 1 + 2**-6]  # ties go to the even neighbour
    assert torch.equal(codec.encode(decoded), encoded), "what is decoded is encoded as the same"


@given(length=st.integers(1, 1500), seed=st.integers(0, 1000), rounding=st.sampled_from(["nearest", "stochastic"]))
@settings(max_examples=60, deadline=None)
def test_int8_is_off_by_half_a_step_or_less_than_one(length: int, seed: int, rounding: str) -> None:
    codec = codec_of(SyncConfig(codec="int8", rounding=rounding))
    assert codec is not None
    values = noise(2, length, seed)
    error = (there_and_back(codec, values, seed) - values).abs()
    for low in range(0, length, 256):
        block = values[:, low : low + 256]
        step = block.abs().amax(1, keepdim=True) / 127
        most = step * (0.5 if rounding == "nearest" else 1.0) * (1 + 1e-4)
        assert (error[:, low : low + 256] <= most).all()


def test_stochastic_rounding_is_right_on_average() -> None:
    """Over seeds, for each value; the mean of 4,096 roundings is within 5 of its standard deviations."""
    codec, values = opened("stochastic"), noise(1, 300)
    trials = 4096
    total = sum(there_and_back(codec, values, seed_of(0, trial)).double() for trial in range(trials))
    step = torch.cat([values[:, low : low + 256].abs().amax().repeat(min(256, 300 - low)) for low in (0, 256)]) / 127
    assert ((total / trials - values).abs() <= step * 0.5 / math.sqrt(trials) * 5 + values.abs() * 1e-6).all()


def test_random_numbers_are_uniform_and_depend_on_the_seed_only() -> None:
    first = dither([70_000], seed_of(1, 2, 3), CPU)
    assert torch.equal(first[:50], dither([50], seed_of(1, 2, 3), CPU)), "a longer table begins as a shorter one does"
    assert not torch.equal(first, dither([70_000], seed_of(1, 3, 2), CPU))
    assert first.min() >= 0
    assert first.max() < 1
    counts = torch.histc(first, bins=10, min=0, max=1)
    assert (counts - 7000).abs().max() < 5 * math.sqrt(7000)
    shifts = torch.tensor([shift(seed_of(0, n)) for n in range(5000)])
    assert abs(shifts.mean().item() - 0.5) < 5 / math.sqrt(12 * 5000)


def test_onebit_keeps_signs_and_the_mean_magnitude_of_each_block() -> None:
    values = noise(2, 600)
    decoded = there_and_back(opened("onebit"), values)
    assert torch.equal(decoded < 0, values < 0)
    for low, high in ((0, 256), (256, 512), (512, 600)):
        mean = values[:, low:high].abs().mean(1, keepdim=True).expand(-1, high - low)
        torch.testing.assert_close(decoded[:, low:high].abs(), mean)


def test_topk_keeps_the_largest_as_they_are() -> None:
    values = noise(2, 1000)
    decoded = there_and_back(opened("topk"), values)
    assert (decoded != 0).sum(1).tolist() == [50, 50]
    kept = decoded != 0
    assert torch.equal(decoded[kept], values[kept])
    for row in range(2):
        assert values[row][kept[row]].abs().min() >= values[row][~kept[row]].abs().max()


SAMPLED = 61  # how far apart the values are that the threshold of long rows is taken from
LONG_ROWS = {
    "noise": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(1)),
    "few values": lambda n: torch.randint(-2, 3, (n,), generator=torch.Generator().manual_seed(2)).float(),
    "zeros": torch.zeros,
    "only the sample is large": lambda n: (torch.arange(n) % SAMPLED == 0).float() * 3 + 1e-3,
    "all but the sample is large": lambda n: (torch.arange(n) % SAMPLED != 0).float() * 3 + 1e-3,
    "one is not finite": lambda n: torch.ones(n).index_fill_(0, torch.tensor([777]), math.nan),
    "many are not finite": lambda n: torch.ones(n).index_fill_(0, torch.arange(0, n, 3), math.inf),
}


@pytest.mark.parametrize("values", LONG_ROWS)
def test_topk_of_long_rows_is_exact_whatever_the_sample_says(values: str) -> None:
    codec = TopkCodec(0.01)
    row = LONG_ROWS[values](40_000)
    encoded = codec.encode(torch.stack([row, -2 * row]))
    decoded = codec.decode(encoded, 40_000)
    kept = codec.kept(40_000)
    places = encoded[:, 4 * kept :].view(torch.int32)
    assert [len(set(of_row.tolist())) for of_row in places] == [kept, kept]
    for sent, wanted in ((decoded[0], row), (decoded[1], -2 * row)):
        chosen = wanted.abs()[places[0 if sent is decoded[0] else 1].long()]
        largest = torch.topk(wanted.abs(), kept).values
        assert torch.equal(chosen.sort().values.nan_to_num(-1), largest.sort().values.nan_to_num(-1))
        assert sent.isfinite().all() == wanted.isfinite().all()
    assert torch.equal(encoded, codec.encode(torch.stack([row, -2 * row])))
