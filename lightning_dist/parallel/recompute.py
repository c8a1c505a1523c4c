"""Recomputation: blocks keep their input for backward, not their activations, and run again when backward reaches them.

Which blocks and how is :class:`~lightning_dist.config.RecomputeConfig`'s ``mode``. Results do not change: gradients are
those without recomputation bit for bit, random masks are drawn again alike, and buffers are written once.

The mechanism is :func:`torch.utils.checkpoint.checkpoint` without reentrant autograd; Chen et al., "Training deep nets
with sublinear memory cost", 2016. What is added: which blocks (:mod:`.blocks`), where it stands in a block
(:mod:`.recomputed_call`), buffers (:mod:`.written_buffers`), and a choice by bytes (:mod:`.recompute_choice`) from
measured costs (:mod:`.activation_meter`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from lightning_dist.config import RecomputeConfig
from lightning_dist.errors import ConfigError
from lightning_dist.parallel.activation_meter import ActivationMeter, Measurement
from lightning_dist.parallel.blocks import Block, BlockKind, find_blocks, spans
from lightning_dist.parallel.module_tree import COMPILED, class_of, has_parts
from lightning_dist.parallel.recompute_choice import BlockCost, Choice, choose_blocks, format_bytes, with_typical_times
from lightning_dist.parallel.recomputed_call import RecomputedCall

Agree = Callable[[list[int]], list[int]]

# What "selective" keeps. Names, since not every build of torch has all of them.
EXPENSIVE_OPERATIONS = (
    *("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    "convolution",
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable",),
)


class Recomputation:
    """Recomputes the blocks of a model, from :meth:`attach` to :meth:`release`.

    The sequence of calls, on every rank: :meth:`attach` once the model is whole, before or after ``fully_shard`` and
    DDP; :meth:`settle` after each backward (only mode ``budget`` has something to settle, once); :meth:`release`.

    Args:
        model: Whole; parameters may be on the meta device.
        config: Which blocks, and how.
        agree: Element-wise maximum over ranks; called on every rank alike, by the first :meth:`settle`.
        clock_ns: Monotonic clock, in nanoseconds.

    Raises:
        ConfigError: There are no blocks, or they cannot be measured although the mode is ``budget``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RecomputeConfig,
        *,
        agree: Agree = list,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.blocks: tuple[Block, ...] = () if config.mode == "off" else blocks_to_recompute(model, config)
        self.choice: Choice | None = None
        self._config = config
        self._agree = agree
        self._measurement = Measurement(clock_ns)
        self._meters: dict[str, ActivationMeter] = {}
        self._calls: dict[str, RecomputedCall] = {}
        if config.mode == "budget":
            _check_measurable(model, self.blocks)

    def attach(self) -> None:
        """Recompute from the next forward on; with mode ``budget``, every block until :meth:`settle`. Safe twice."""
        if self._calls:
            return
        policy = keep_expensive if self._config.mode == "selective" else None
        if self._config.mode == "budget" and self.choice is None:
            self._meters = {block.name: self._measurement.meter(block.module) for block in self.blocks}
        for block in self._selected:
            call = RecomputedCall(block.module, policy=policy, meter=self._meters.get(block.name))
            call.install()
            self._calls[block.name] = call

    def settle(self) -> Choice | None:
        """With mode ``budget``, at its first call: choose blocks from what was measured, and let the others keep all.

        Call it on every rank after the first backward; it is collective over ``agree``, and all ranks choose alike.
        Blocks that did not run stay recomputed. Later, and in other modes, it does nothing and returns None.
        """
        if not self._meters:
            return None
        budget_bytes = self._config.budget_bytes
        assert budget_bytes is not None
        self._measurement.is_counting = False
        costs = with_typical_times([cost for cost in self._agreed_costs() if cost.is_measured])
        self.choice = choose_blocks(costs, budget_bytes)
        for name in {cost.name for cost in costs} - set(self.choice.recomputed):
            self._calls.pop(name).release()
        for call in self._calls.values():
            call.stop_measuring()
        self._meters.clear()
        return self.choice

    def release(self) -> None:
        """Recompute no more; the model is as it was. Safe twice."""
        for call in self._calls.values():
            call.release()
        self._calls.clear()
        self._meters.clear()

    def describe(self) -> str:
        """What is recomputed and, once chosen from a budget, what that is predicted to cost."""
        config, count = self._config, len(self.blocks)
        if config.mode == "off":
            return "recompute=off: every block keeps its activations until its backward"
        if self.choice is not None:
            return self._describe_choice(self.choice)
        selected = self._selected
        what = {
            "full": "run again in backward",
            "every_n": f"(one of {config.every}) run again in backward",
            "selective": "run again in backward, except for matrix products, attention and convolutions",
            "budget": f"run again in backward until one backward has been measured against {config.budget}",
        }[config.mode]
        reasons = "; ".join(dict.fromkeys(block.reason for block in self.blocks))
        names = spans(block.name for block in selected)
        return f"recompute={config.mode}: {len(selected)} of {count} blocks {what}: {names} ({reasons})"

    @property
    def shortfall(self) -> str | None:
        """What to warn of: the budget is too small for any choice. None if it is not, or is not known yet."""
        if self.choice is None or self.choice.fits:
            return None
        return (
            f"recompute.budget={format_bytes(self.choice.budget_bytes)} is too small: with every block recomputed, "
            f"they still hold {format_bytes(self.choice.peak_bytes)} of activations at a time (all inputs, and all "
            "that the block keeps which backward has reached). Write a larger budget, or use smaller micro-batches or "
            "blocks"
        )

    @property
    def _selected(self) -> tuple[Block, ...]:
        """Blocks that the mode recomputes; with ``budget``, all until the choice is made."""
        if self._config.mode == "every_n":
            return self.blocks[:: self._config.every]
        if self.choice is not None:
            return tuple(block for block in self.blocks if block.name in self.choice.recomputed)
        return self.blocks

    def _agreed_costs(self) -> list[BlockCost]:
        measured = [(meter.input_bytes, meter.inner_bytes, meter.forward_ns()) for meter in self._meters.values()]
        agreed = iter(self._agree([number for numbers in measured for number in numbers]))
        blocks = [block for block in self.blocks if block.name in self._meters]
        return [
            BlockCost(block.name, class_of(block.module).__name__, input_bytes, inner_bytes, forward_ns / 1e9)
            for block, input_bytes, inner_bytes, forward_ns in zip(blocks, agreed, agreed, agreed, strict=True)
        ]

    def _describe_choice(self, choice: Choice) -> str:
        names = f": {spans(choice.recomputed)}" if choice.recomputed else ""
        lines = [
            f"recompute=budget ({format_bytes(choice.budget_bytes)}): {len(choice.recomputed)} of {len(self.blocks)} "
            f"blocks run again in backward{names}",
            f"  predicted: {format_bytes(choice.kept_bytes)} kept after forward, {format_bytes(choice.peak_bytes)} at "
            f"most in backward, {choice.extra_s * 1e3:.1f} ms more a step",
        ]
        unmeasured = [name for name in self._calls if name not in choice.recomputed]
        if unmeasured:
            lines.append(f"  not run when it was measured, and recomputed: {spans(unmeasured)}")
        return "\n".join(lines)


def blocks_to_recompute(model: nn.Module, config: RecomputeConfig) -> tuple[Block, ...]:
    """Blocks worth recomputing: those named, else repeated ones made of parts, else large ones made of parts.

    A single layer keeps little but its input; it is recomputed only if named. A block inside another runs again with
    that one and is left out. Blocks may share parameters: recomputation does not mind.

    Raises:
        ConfigError: There are none, or a name matches nothing.
    """
    found = find_blocks(model, named=tuple(config.modules or ()), exclusive=False)
    for kind in BlockKind.NAMED, BlockKind.REPEATED, BlockKind.SIZE:
        blocks = [block for block in found if block.kind is kind]
        if kind is not BlockKind.NAMED:
            blocks = [block for block in blocks if has_parts(block.module)]
        inside = {part for block in blocks for part in block.module.modules() if part is not block.module}
        if blocks:
            return tuple(block for block in blocks if block.module not in inside)
    raise ConfigError(
        f"recompute={config.mode} found no blocks in {class_of(model).__name__}: no container holds two or more "
        "modules of one class that are made of parts. Name them, e.g. recompute.modules=[Block] or [model.blocks.*], "
        "or write recompute=off"
    )


def keep_expensive(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of mode ``selective``: keep what :data:`EXPENSIVE_OPERATIONS` return, run everything else again.

    Attention with dropout runs again too: if it were skipped, whatever draws random numbers after it would get others
    than in forward.
    """
    keeps = operation in _expensive_operations() and not _dropout(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _expensive_operations() -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in EXPENSIVE_OPERATIONS if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def _dropout(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return float(args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value))
    return 0.0


def _check_measurable(model: nn.Module, blocks: Sequence[Block]) -> None:
    for block in blocks:
        parts = block.name.split(".")
        for end in range(len(parts)):
            path = ".".join(parts[:end])
            above = model.get_submodule(path)
            if COMPILED in above._modules or above._compiled_call_impl is not None:
                raise ConfigError(
                    f"recompute=budget cannot measure {block.name}: it is part of {path or 'the model'}, which is "
                    "compiled as a whole. Compile the blocks instead, or write recompute=full or selective"
                )
