"""Split models equal whole ones: values, gradients, optimizers, dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # the name everybody uses

from lightning_dist.errors import CombinationError
from lightning_dist.parallel.full_tensors import StateDictHooks
from lightning_dist.parallel.tensor import TensorParallel, keep_kinds_apart, parallelize
from lightning_dist.parallel.tensor.logits import gathered
from tests.distributed.split_models import (
    BATCH,
    MODELS,
    TIME,
    VOCABULARY,
    RunResult,
    disturbed,
    loss_of,
    make_batches,
    make_gpt,
    make_optimizer,
    placed_mesh,
    whole_gpt,
    whole_gradients,
    whole_tensors,
)
from tests.support.ranks import RankPool
from tests.support.reference import ReferenceStep, assert_same, train_reference
from tests.support.tasks import RankContext

STEPS = 4
# What other orders of summation differ by after a few steps; nothing but rounding, as the runs in fp64 show.
ATOL = {torch.float32: 1e-6, torch.float64: 1e-13}


# -- training ---------------------------------------------------------------------------------------------------------


def train(
    context: RankContext,
    kind: str,
    size: int,
    optimizer_name: str,
    *,
    loss_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    plan: Any = "auto",
) -> RunResult:
    model = MODELS[kind]().to(dtype)
    with placed_mesh(context, {"tp": size}) as placed:
        parallel = parallelize(disturbed(model, placed.mesh), placed.mesh, plan=plan, loss_parallel=loss_parallel)
        optimizer = make_optimizer(optimizer_name, model.parameters())
        keep_kinds_apart(optimizer)
        losses = []
        for batch in make_batches(kind, STEPS, dtype=dtype):
            optimizer.zero_grad()
            with parallel.running():
                loss = loss_of(model, batch)
            with parallel.running():
                loss.backward()
            optimizer.step()
            assert not isinstance(loss, DTensor), "the loss is a plain tensor"
            losses.append(float(loss.detach()))
        return RunResult.of(losses, parallel, model, optimizer)


def reference(kind: str, optimizer_name: str, *, dtype: torch.dtype = torch.float32) -> list[ReferenceStep]:
    return train_reference(
        make_model=lambda: MODELS[kind]().to(dtype),
        make_optimizer=lambda parameters: make_optimizer(optimizer_name, parameters),
        batches=[make_batches(kind, STEPS, dtype=dtype)],
        loss_of=loss_of,
    )


def check(results: list[RunResult], steps: list[ReferenceStep], atol: float) -> None:
    for result in results:
        expected = [step.loss for step in steps]
        assert result.losses == pytest.approx(expected, abs=max(atol, 1e-12))
        assert_same(result.weights, steps[-1].weights, atol=atol)
        assert_same(result.optimizer_state, steps[-1].optimizer_state, atol=10 * atol)  # gradients of up to 10, summed


@pytest.mark.parametrize(
    ("kind", "size", "optimizer", "loss_parallel"),
    [
        ("gpt", 2, "adamw", True),
        ("gpt", 4, "sgd", False),
        ("huggingface", 2, "adamw", False),
        ("huggingface", 2, "sgd", True),
        ("mlp", 3, "adamw", False),  # odd sizes
    ],
)
def test_equals_one_process(ranks: RankPool, kind: str, size: int, optimizer: str, loss_parallel: bool) -> None:
    results = ranks.run(train, world_size=size, args=(kind, size, optimizer), kwargs={"loss_parallel": loss_parallel})
    check(results, reference(kind, optimizer), ATOL[torch.float32])


@pytest.mark.parametrize(("kind", "size"), [("gpt", 4), ("huggingface", 2)])
def test_the_difference_is_rounding(ranks: RankPool, kind: str, size: int) -> None:
    results = ranks.run(
        train, world_size=size, args=(kind, size, "sgd"), kwargs={"dtype": torch.float64, "loss_parallel": True}
    )
    check(results, reference(kind, "sgd", dtype=torch.float64), ATOL[torch.float64])


PARTIAL_PLANS = [
    {"blocks.*.up": "column", "blocks.*.down": "row"},
    {"tokens": "embedding", "head": "head"},
    {
        "*attention": "heads:n_head",
        "*.qkv": "fused_column:3",
        "*attention.out": "row",
        "blocks.0.*.out": "replicate",
        "blocks.0.*.qkv": "replicate",
        "blocks.0.attention": "heads:",
    },
]


@pytest.mark.parametrize("plan", PARTIAL_PLANS, ids=["mlp", "vocabulary", "attention_of_one_block"])
def test_a_part_of_the_layers_may_be_split(ranks: RankPool, plan: dict[str, str]) -> None:
    results = ranks.run(train, world_size=2, args=("gpt", 2, "sgd"), kwargs={"plan": plan})
    check(results, reference("gpt", "sgd"), ATOL[torch.float32])


# -- values -----------------------------------------------------------------------------------------------------------


def state_of(parallel: TensorParallel) -> dict[str, Tensor]:
    hooks = StateDictHooks(parallel.model, whole_tensors(parallel))
    state = parallel.model.state_dict()
    hooks.release()
    return state


def split_and_look(context: RankContext) -> dict[str, Any]:
    model = make_gpt()
    with placed_mesh(context, {"tp": 2}) as placed:
        parallel = parallelize(disturbed(model, placed.mesh), placed.mesh)
        parameters = dict(model.named_parameters())
        attention = model.blocks[0].attention
        return {
            "full": {name: whole.clone() for name, whole in state_of(parallel).items()},
            "local": {
                name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters.items()
            },
            "whole": [name for name, p in parameters.items() if not isinstance(p, DTensor)],
            "is_tied": model.head.weight is model.tokens.weight,
            "n_head": attention.n_head,
            "description": parallel.split.describe(),
        }


def test_every_rank_holds_its_part_of_the_first_ranks_values(ranks: RankPool) -> None:
    whole = {name: p.detach() for name, p in whole_gpt().named_parameters()}
    results = ranks.run(split_and_look, world_size=2)
    for rank, result in enumerate(results):
        assert_same({k: v for k, v in result["full"].items() if k != "head.weight"}, whole, atol=0)
        assert torch.equal(result["full"]["head.weight"], whole["tokens.weight"])
        local = result["local"]
        q, k, v = (part.chunk(2)[rank] for part in whole["blocks.1.attention.qkv.weight"].chunk(3))
        assert torch.equal(local["blocks.1.attention.qkv.weight"], torch.cat([q, k, v]))
        assert torch.equal(local["blocks.1.up.bias"], whole["blocks.1.up.bias"].chunk(2)[rank])
        assert torch.equal(local["blocks.1.down.weight"], whole["blocks.1.down.weight"].chunk(2, 1)[rank])
        assert torch.equal(local["blocks.1.down.bias"], whole["blocks.1.down.bias"])
        assert torch.equal(local["tokens.weight"], whole["tokens.weight"].chunk(2)[rank])
        assert result["is_tied"]
        assert result["n_head"] == 2
        assert "blocks.0.norm1.weight" in result["whole"]
        assert result["description"] == (
            "tensor parallel over 2 ranks, plan gpt: 4 column, 4 row, 1 embedding, 1 head"
        ).replace("4 column", "2 column, 2 fused_column")


def load_and_release(context: RankContext) -> dict[str, Any]:
    model = make_gpt()
    before = dict(model.named_parameters(remove_duplicate=False))
    before["blocks.0.up.weight"].no_decay = True  # type: ignore[attr-defined]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with placed_mesh(context, {"dp_shard": 2, "tp": 2}) as placed:
        parallel = parallelize(model, placed.mesh["tp"])
        kept = getattr(model.blocks[0].up.weight, "no_decay", False)
        other = whole_gpt(seed=1).state_dict()
        speaking = StateDictHooks(model, whole_tensors(parallel))
        model.load_state_dict(other)
        loaded = {name: value.clone() for name, value in model.state_dict().items()}
        part = {name: value.clone() for name, value in model.blocks[1].state_dict().items()}
        with pytest.raises(RuntimeError, match=r"blocks.0.up.bias"):
            model.load_state_dict({k: v for k, v in other.items() if k != "blocks.0.up.bias"})
        with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
            model.load_state_dict({**other, "head.weight": torch.zeros(3, 3)})
        speaking.release()
        parallel.release()
        parallel.release()
        after = dict(model.named_parameters(remove_duplicate=False))
        return {
            "kept": kept,
            "loaded": loaded,
            "part": part,
            "released": {name: value.detach().clone() for name, value in model.state_dict().items()},
            "same_objects": all(after[name] is parameter for name, parameter in before.items()),
            "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) - hooks,
            "n_head": model.blocks[0].attention.n_head,
            "loss": float(loss_of(model, make_batches("gpt", 1)[0]).detach()),
        }


def test_whole_values_can_be_loaded_and_a_model_is_whole_after_release(ranks: RankPool) -> None:
    expected = whole_gpt(seed=1)
    for result in ranks.run(load_and_release, world_size=4):
        assert result["kept"], "what a user notes on a parameter goes with it"
        assert_same(result["loaded"], expected.state_dict(), atol=0)
        assert_same(result["part"], expected.blocks[1].state_dict(), atol=0)
        assert_same(result["released"], expected.state_dict(), atol=0)
        assert result["same_objects"]
        assert result["hooks"] == 0
        assert result["n_head"] == 4
        assert result["loss"] == float(loss_of(expected, make_batches("gpt", 1)[0]).detach())


# -- running ----------------------------------------------------------------------------------------------------------


def forward_in_modes(context: RankContext) -> dict[str, Tensor]:
    model = make_gpt()
    inputs = make_batches("gpt", 1)[0][0]
    with placed_mesh(context, {"tp": 2}) as placed:
        parallelize(model, placed.mesh)
        with torch.no_grad():
            no_grad = model.eval()(inputs)
        with torch.inference_mode():
            inference = model(inputs)
        by_name = model.blocks[0].up(input=torch.ones(2, 12))
        # Not contiguous: another kernel adds the bias.
        strided = model.blocks[0].down(torch.ones(24, 3, 2).transpose(0, 2))
        with torch.autocast("cpu", torch.bfloat16):
            autocast = model(inputs)
        assert autocast.dtype == torch.bfloat16
        return {
            "no_grad": no_grad,
            "inference": inference.clone(),
            "by_name": by_name.detach(),
            "strided": strided.detach(),
            "autocast": autocast.detach().float(),
        }


def test_forward_is_right_in_every_mode(ranks: RankPool) -> None:
    model = whole_gpt()
    whole = model(make_batches("gpt", 1)[0][0]).detach()
    up = model.blocks[0].up(torch.ones(2, 12)).detach()
    down = model.blocks[0].down(torch.ones(2, 3, 48)).detach()
    for rank, result in enumerate(ranks.run(forward_in_modes, world_size=2)):
        for mode in ("no_grad", "inference"):
            assert torch.allclose(result[mode], whole, atol=1e-5), mode
        assert torch.allclose(result["by_name"], up.chunk(2, -1)[rank], atol=1e-6)
        assert torch.allclose(result["strided"], down, atol=1e-5)
        assert torch.allclose(result["autocast"], whole, atol=0.05 * float(whole.abs().max()))  # 8 bits


def use_logits(context: RankContext) -> dict[str, Any]:
    model = make_gpt()
    inputs, targets = make_batches("gpt", 1)[0]
    with placed_mesh(context, {"tp": 2}) as placed:
        parallel = parallelize(model, placed.mesh, loss_parallel=True)
        outside = model(inputs)
        with parallel.running():
            logits = model(inputs)
            assert isinstance(logits, DTensor)
            flat, classes_second = logits.flatten(0, 1), logits.transpose(1, 2)
            results = uses_of(logits, flat, classes_second, targets)
            with pytest.raises(CombinationError, match="cannot be changed in place"):
                logits.div_(2.0)
            with pytest.raises(CombinationError, match="cannot be changed in place"):
                logits[0] = 0.0
            sum(results[name] for name in LOSSES).backward()
            shape = tuple(logits.shape)
        results["gradient"] = whole_gradients(parallel, model)["tokens.weight"]
        assert not any(isinstance(value, DTensor) for value in results.values())
        return {"outside": outside.detach(), "shape": shape, **{k: v.detach() for k, v in results.items()}}


LOSSES = ("flat", "classes_second", "shifted", "summed", "weighted", "smoothed", "by_hand", "float")


def uses_of(logits: Tensor, flat: Tensor, classes_second: Tensor, targets: Tensor) -> dict[str, Tensor]:
    classes = torch.linspace(0.5, 1.5, VOCABULARY)
    target = targets.flatten()
    shifted = logits[..., :-1, :].contiguous().view(-1, VOCABULARY)
    return {
        "flat": F.cross_entropy(flat, target),
        "classes_second": nn.CrossEntropyLoss()(classes_second, targets),
        "shifted": F.cross_entropy(shifted, targets[..., 1:].reshape(-1)),
        "summed": F.cross_entropy(flat, target, reduction="none").sum(),
        "weighted": F.cross_entropy(flat, target, classes),
        "smoothed": F.cross_entropy(flat, target, label_smoothing=0.1),
        "by_hand": F.nll_loss(F.log_softmax(flat, -1), target),
        "float": F.cross_entropy(flat.float(), target.clamp_min(0), ignore_index=3),
        "accuracy": (logits.argmax(-1) == targets).float().mean(),
        "top": logits.topk(3).values,
        "cut": logits[..., 5:9],
        "scaled": logits / 2.0,
        "picked": logits[targets >= 0],
    }


def test_logits_may_be_used_for_anything_under_loss_parallel(ranks: RankPool) -> None:
    model = whole_gpt()
    inputs, targets = make_batches("gpt", 1)[0]
    logits = model(inputs)
    expected = uses_of(logits, logits.flatten(0, 1), logits.transpose(1, 2), targets)
    sum(expected[name] for name in LOSSES).backward()
    assert model.head.weight.grad is not None
    expected = {"gradient": model.head.weight.grad, **{k: v.detach() for k, v in expected.items()}}
    for result in ranks.run(use_logits, world_size=2):
        assert result.pop("shape") == (BATCH, TIME, VOCABULARY)
        assert torch.allclose(result.pop("outside"), logits.detach(), atol=1e-5)
        assert_same(result, expected, atol=1e-5)  # logits of size 10


ON_PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "function": lambda logits, target: F.cross_entropy(logits, target),
    "by name": lambda logits, target: F.cross_entropy(input=logits, target=target),
    "module": lambda logits, target: nn.CrossEntropyLoss(ignore_index=3)(logits, target.clamp_min(0)),
    "sum": lambda logits, target: F.cross_entropy(logits, target, reduction="sum"),
    "none": lambda logits, target: F.cross_entropy(logits, target, reduction="none"),
    "weighted": lambda logits, target: F.cross_entropy(logits, target, CLASSES),
    "weighted sum": lambda logits, target: F.cross_entropy(logits, target, CLASSES, reduction="sum"),
    "weighted none": lambda logits, target: nn.CrossEntropyLoss(CLASSES, reduction="none")(logits, target),
    "weighted, none counts": lambda logits, target: F.cross_entropy(logits, target.clamp(-100, -100), CLASSES),
    "in pieces": lambda logits, target: torch.stack(
        [F.cross_entropy(part, wanted) for part, wanted in zip(logits.chunk(3), target.chunk(3), strict=True)]
    ),
}
GATHERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smoothed": lambda logits, target: F.cross_entropy(logits, target, label_smoothing=0.1),
    "one piece of the rows": lambda logits, target: logits.split([5, 19])[1],
    "one row": lambda logits, target: logits.unbind()[2],
    "one piece of the classes": lambda logits, target: logits.split(5, dim=-1)[1],
    "chunk of the classes": lambda logits, target: torch.chunk(logits, 5, -1)[2],
    "one class": lambda logits, target: logits.unbind(-1)[3],
    "classes in threes": lambda logits, target: logits.unflatten(-1, (3, -1)),
    "copied": lambda logits, target: torch.empty(24, VOCABULARY).copy_(logits),
}
CLASSES = torch.linspace(0.5, 1.5, VOCABULARY)


@contextlib.contextmanager
def gathered_matrices() -> Iterator[list[torch.Size]]:
    """The shapes of what is gathered inside, but for numbers and lists of losses."""
    shapes: list[torch.Size] = []
    gather = DTensor.full_tensor

    def counted(self: DTensor, **kwargs: Any) -> Tensor:
        shapes.extend([self.shape] if self.dim() > 1 else [])
        return gather(self, **kwargs)

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    try:
        yield shapes
    finally:
        DTensor.full_tensor = gather  # type: ignore[method-assign]


def lose(context: RankContext) -> dict[str, tuple[Tensor, Tensor | None, int]]:
    """What each use of the logits gives, the embedding's gradient of it, and how often the logits were gathered."""
    model = make_gpt()
    inputs, targets = make_batches("gpt", 1)[0]
    results: dict[str, tuple[Tensor, Tensor | None, int]] = {}
    with placed_mesh(context, {"tp": 2}) as placed:
        parallel = parallelize(model, placed.mesh, loss_parallel=True)
        for name, use in {**ON_PARTS, **GATHERED}.items():
            model.zero_grad()
            with parallel.running(), gathered_matrices() as gathers:
                result = use(model(inputs).flatten(0, 1), targets.flatten())
            with parallel.running():
                gathered(result).square().sum().backward()
            gradient = whole_gradients(parallel, model)["tokens.weight"]
            results[name] = gathered(result).detach(), gradient, len(gathers)
    return results


def test_the_loss_is_computed_on_the_parts(ranks: RankPool) -> None:
    model = whole_gpt()
    inputs, targets = make_batches("gpt", 1)[0]
    found = ranks.run(lose, world_size=2)
    for name, use in {**ON_PARTS, **GATHERED}.items():
        model.zero_grad()
        expected = use(model(inputs).flatten(0, 1), targets.flatten())
        expected.square().sum().backward()
        for result in found:
            value, gradient, gathers = result[name]
            torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(gradient, model.head.weight.grad, rtol=1e-4, atol=1e-4, equal_nan=True)
            if name in ON_PARTS:
                assert gathers == 0, f"{name}: logits were gathered"


def fail_after(loss: Tensor) -> None:
    raise ZeroDivisionError(f"after {loss}")


def handlers_after_an_error(context: RankContext) -> tuple[bool, bool]:
    model = make_gpt()
    batch = make_batches("gpt", 1)[0]
    with placed_mesh(context, {"tp": 2}) as placed:
        parallel = parallelize(model, placed.mesh, loss_parallel=True)
        before = dict(DTensor._op_dispatcher._custom_op_handlers)
        with pytest.raises(ZeroDivisionError), parallel.running(), parallel.running():
            fail_after(loss_of(model, batch))
        with parallel.running():  # as under manual optimization: backward inside the training step
            loss = loss_of(model, batch)
            with parallel.running():
                loss.backward()
            inside = isinstance(model(batch[0]), DTensor)
        return inside, dict(DTensor._op_dispatcher._custom_op_handlers) == before


def test_running_leaves_nothing_behind(ranks: RankPool) -> None:
    assert ranks.run(handlers_after_an_error, world_size=2) == [(True, True)] * 2
