"""``hierdist laws`` prints the worked numbers, and refuses what is no number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_dist.cli import main
from lightning_dist.cli.quantities import number_of, rate_of
from lightning_dist.errors import ConfigError


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], Any]:
    assert main(["laws", "--json", *arguments]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert all(line["formula"] and line["source"] for line in lines)
    return {(line["law"], line["what"]): line["value"] for line in lines}


def test_worked_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys)
    assert found["Amdahl", "speed-up by 128 ranks"] == pytest.approx(9.3, abs=0.05)
    assert found["Amdahl", "by any number of ranks"] == pytest.approx(10)
    assert found["pipeline bubble", "8 stages idle, with 28 micro-batches"] == pytest.approx(0.2, abs=0.005)


def test_70_billion_parameters_over_100_gbit(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys, "--ranks", "100000", "--parameters", "70b", "--link", "100gbit", "--micro-batches", "4")
    ring = {what: value for (law, what), value in found.items() if law == "ring all-reduce"}
    assert list(ring.values()) == pytest.approx([140e9, 280e9, 22.4, 11.2], rel=1e-4)
    assert found["pipeline bubble", "8 stages idle, with 4 micro-batches"] == pytest.approx(0.64, abs=0.005)


def test_100_cards_for_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys, "--ranks", "100", "--failure-rate", "1e-4", "--hours", "24")
    assert found["failures", "at least one in 24 h"] == pytest.approx(0.21, abs=0.005)
    assert found["failures", "time between two, on average"] == pytest.approx(360_000)


def test_memory_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys, "--ranks", "64", "--parameters", "7.5B")
    memory = [value / 1e9 for (law, _), value in found.items() if law.startswith("memory")]
    assert memory == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_no_limit_is_null_and_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys, "--parallel-fraction", "1", "--failure-rate", "0")
    assert found["Amdahl", "by any number of ranks"] is None
    assert found["failures", "time between two, on average"] is None
    assert not any(law == "checkpoints" for law, _ in found)
    assert main(["laws", "--parallel-fraction", "1", "--failure-rate", "0"]) == 0
    shown = capsys.readouterr().out
    assert "no limit" in shown
    assert "never" in shown


def test_one_host_has_no_hierarchy(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any(law.startswith("hierarchical") for law, _ in _printed(capsys, "--ranks", "4", "--hosts", "1"))


def test_table_has_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laws"]) == 0
    shown = capsys.readouterr().out
    for figure in ("9.34 x", "140.0 GB", "22.2 s", "20.0%", "3.3 days"):
        assert figure in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "4", "--hosts", "5"], "--hosts must be between 1 and --ranks 4, got 5"),
        (["--parameters", "many"], "--parameters 'many' is no number"),
        (["--parameters", "0"], "--parameters must be positive"),
        (["--link", "fast"], "--link 'fast' is no rate of a link; write e.g. 100gbit"),
        (["--parallel-fraction", "1.5"], "--parallel-fraction must be between 0 and 1, got 1.5"),
        (["--failure-rate", "-1"], "--failure-rate must be between 0 and 1, got -1"),
        (["--save-s", "0"], "--save-s must be a positive number"),
        (["--stages", "0"], "stages must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laws", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100gbit", 12.5e9),
        ("100 Gbit/s", 12.5e9),
        ("400mbit", 50e6),
        ("10Gb/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("12.5GB/s", 12.5e9),
        ("1e9B", 1e9),
        ("8bit", 1.0),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert rate_of("--link", text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "gbit", "0gbit", "-1gbit", "10", "10x", "1e999gbit"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="--link"):
        rate_of("--link", text)


def test_numbers() -> None:
    assert [number_of("--parameters", text) for text in ("25_000_000", "25M", "7b", "1.5T", "2e3")] == [
        25e6,
        25e6,
        7e9,
        1.5e12,
        2000,
    ]
