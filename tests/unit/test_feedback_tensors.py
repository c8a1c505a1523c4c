"""What is owed, parted into an object and tensors of a checkpoint, and put together again."""

from __future__ import annotations

import torch

from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.feedback import Feedback, Origin, Place, Span
from lightning_dist.config import SyncConfig
from lightning_dist.modes.feedback_tensors import joined, parted

STATE = {
    "layout": "x",
    "window": 3,
    "accounts": [{"spans": [("a", 0, 5)], "residues": [(("part", (0, 2), 4, 1.0), torch.arange(6.0).view(2, 3))]}],
    "filed": {"a": [(2, torch.ones(2)), (0, torch.empty(0))]},
    "other": torch.arange(3),
}


def test_values_are_not_in_the_object_and_are_not_copied() -> None:
    plain, held = parted(STATE, "feedback/1/values", rank=1)
    assert [each.local.tolist() for each in held] == [[0, 1, 2, 3, 4, 5], [1, 1]]
    assert {each.names for each in held} == {("feedback/1/values",)}
    assert {each.spread.shape for each in held} == {(8,)}
    assert [(each.spread.boxes[0].offsets, each.spread.boxes[0].sizes) for each in held] == [((0,), (6,)), ((6,), (2,))]
    assert {each.holders for each in held} == {(1,)}
    residues = STATE["accounts"][0]["residues"][0][1]  # type: ignore[index]
    assert held[0].local.data_ptr() == residues.data_ptr()
    assert "tensor(" not in str(plain).replace("tensor([0, 1, 2])", ""), "only what is not fp32"


def test_put_together_it_is_what_it_was() -> None:
    plain, held = parted(STATE, "values", rank=0)
    back = joined(plain, torch.cat([each.local for each in held]))
    ((place, rows),) = back["accounts"][0]["residues"]
    assert place == ["part", [0, 2], 4, 1.0]
    assert torch.equal(rows, torch.arange(6.0).view(2, 3))
    assert [(low, values.tolist()) for low, values in back["filed"]["a"]] == [(2, [1, 1]), (0, [])]
    assert torch.equal(back["other"], torch.arange(3))


def test_a_state_without_values_needs_none() -> None:
    plain, held = parted({"filed": {}, "window": 0}, "values", rank=0)
    assert held == []
    assert joined(plain, None) == {"filed": {}, "window": 0}


def test_a_rank_goes_on_from_it_as_if_it_had_not_stopped() -> None:
    codec = codec_of(SyncConfig(codec="onebit"))
    assert codec is not None
    straight, stopped = (Feedback(layout="here", rank=0) for _ in range(2))
    origin = Origin("a", (Span("x", 0, 600),), 0.5)
    for step in range(4):
        if step == 2:
            plain, held = parted(stopped.state_dict(), "values", rank=0)
            stopped = Feedback(layout="here", rank=0)
            values = torch.cat([each.local for each in held])
            stopped.load_state_dicts([joined(plain, values)], torch.device("cpu"))
        rows = torch.randn(2, 300, generator=torch.Generator().manual_seed(step))
        sent = [
            each.enter(origin, torch.zeros(600)).encode(codec, rows, Place("part", (0, 300), 600, 1.0))
            for each in (straight, stopped)
        ]
        assert torch.equal(sent[0], sent[1])
    assert straight.window == stopped.window
