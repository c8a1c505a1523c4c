"""The pure parts of the benchmark of compression."""

from __future__ import annotations

import math

import pytest

from benchmarks.compression.figures import bytes_a_step, mean_losses, paired, seconds_to, step_s, steps_to
from benchmarks.compression.guide import BEGIN, END, put_in, table
from benchmarks.compression.measuring import gradients_of, reached
from benchmarks.compression.report import markdown, times_to_loss
from benchmarks.compression.training import DEFAULT, SMALL, Trained

RANKS = [
    Trained([1.0, 2.0, 4.0, 5.0, 9.0], [100, 200, 300, 400, 500], [5.0, 4.0, 3.0, 2.0, 1.0]),
    Trained([1.0, 2.5, 4.0, 6.0, 9.0], [100, 200, 300, 500, 700], [7.0, 6.0, 5.0, 4.0, 3.0]),
]


def test_a_step_is_as_long_as_the_slowest_ranks() -> None:
    assert step_s(RANKS, after=1) == 2.0, "the median of 1.5, 2, 2 and 4"
    assert step_s(RANKS, after=1, period=2) == 2.0, "of periods of two steps: 3 and 5"


def test_bytes_are_of_the_host_that_sent_most() -> None:
    assert bytes_a_step(RANKS, after=1) == 150
    assert bytes_a_step(RANKS, after=3) == 200


def test_steps_to_a_loss_wait_for_a_whole_window() -> None:
    losses = mean_losses(RANKS)
    assert losses == [6.0, 5.0, 4.0, 3.0, 2.0]
    assert steps_to(losses, 4.5, window=2) == 3
    assert steps_to(losses, 6.0, window=3) == 3, "the window is full then"
    assert steps_to(losses, 1.0, window=2) == math.inf


def test_ratios_are_taken_within_rounds() -> None:
    rows = paired({"a": [4.0, 8.0, 6.0], "b": [2.0, 2.0, 6.0]}, "a")
    assert rows["b"] == {"median": 2.0, "all": [2.0, 2.0, 6.0], "times_less": 2.0, "spread": [1.0, 4.0]}


def test_exact_steps_at_the_beginning_take_their_own_time() -> None:
    assert seconds_to(10, step=1.0, exact_steps=4, exact_step=5.0) == 26.0
    assert seconds_to(3, step=1.0, exact_steps=4, exact_step=5.0) == 15.0


def test_what_is_never_reached_has_no_time() -> None:
    long = [Trained([float(n) for n in range(40)], [0] * 40, [2.0] * 20 + [1.0] * 20)]
    assert reached(long, 1.5) == {"seconds": 34.0, "steps": 35, "first_loss": 2.0, "last_loss": pytest.approx(4 / 3)}
    assert reached(long, 1.0)["seconds"] is None


def test_nearly_all_values_of_the_gpt_are_in_matrices() -> None:
    default, small = gradients_of(DEFAULT), gradients_of(SMALL)
    assert default["share_of_matrices"] > 0.99
    assert default["all_times_fewer_by_powersgd"] > small["all_times_fewer_by_powersgd"] > 10


def _step(median: float) -> dict[str, object]:
    return {"median": median, "times_less": 1.0, "spread": [1.0, 1.0], "bytes_a_host_and_step": 1e6}


def test_time_to_a_loss_is_steps_times_their_time() -> None:
    steps = {"Lightning ddp": _step(0.5), "hierarchical": _step(0.4), "onebit": _step(0.1), "topk": _step(0.1)}
    time = {"base": "Lightning ddp", "arms": steps, "date": "", "commit": "", "command": "time"}
    gap = {"mean": 0.01, "t": {"low": 0.0, "high": 0.02}}
    row = {"loss": {"a": 2.0, "b": 2.01}, "gap": gap, "verdict": "safe here: b is worse by 0.02 at most"}
    loss = {
        "date": "",
        "commit": "",
        "command": "loss",
        "experiment": {"command": ["python", "train.py"], "steps": 300},
        "loss_to_reach": 2.4,
        "smoothed_steps": 30,
        "spread_of_exact_losses": 0.01,
        "exact_steps_to_loss": [200, 210, 190],
        "arms": {
            "onebit": {
                "overrides": ["sync=onebit", "sync.warmup_steps=60"],
                "steps_to_loss": [260, 270, 250],
                **row,
            },
            "topk": {"overrides": ["sync=topk"], "steps_to_loss": [290, None, 295], **row},
        },
    }
    assert times_to_loss(time, loss) == {
        "Lightning ddp": pytest.approx(100.0),
        "hierarchical": pytest.approx(80.0),
        "onebit": pytest.approx(60 * 0.4 + 200 * 0.1),
    }
    text = "\n".join(markdown({"loss": loss, "time, 100 Mbit/s": time}))
    assert "| onebit | 100 | 1.00 (1.00-1.00) | 1.000 | 44.0 | 2.27 |" in text
    assert "not within the budget (1 of 3)" in text


def test_the_guides_table_has_a_line_a_sync_and_a_dash_for_what_is_unknown() -> None:
    arms = {"ddp hierarchical": {"times_fewer": 1.0}, "ddp int8": {"times_fewer": 3.93}}
    time = {"base": "Lightning ddp", "arms": {"Lightning ddp": _step(0.5), "int8": _step(0.1)}}
    lines = list(table({"bytes": {"arms": arms}, "time, 100 Mbit/s": time}))
    assert lines[2] == "| Lightning ddp | - | - | - | 500 | - | - | - |"
    assert lines[4] == "| `int8` | 3.9 | - | - | 100 | - | - | - |"
    assert len(lines) == 5
    page = put_in(f"before\n{BEGIN}\nold\n{END}\nafter\n", iter(["new"]))
    assert page == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="has no"):
        put_in("a page", iter(["new"]))
