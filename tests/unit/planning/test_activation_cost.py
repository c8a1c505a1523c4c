"""Activations of a GPT: against what autograd really keeps of the example's GPT, and against the paper's formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from examples.model import GPT, Block
from lightning_dist import laws
from lightning_dist.errors import ConfigError, UnknownOptionError
from lightning_dist.parallel.recompute import keep_expensive
from lightning_dist.planning.activation_cost import Activations, GPTShape, gpt_activations
from lightning_dist.run_config import GPTConfig

SHAPE = GPTShape(batch=3, sequence=10, width=24, heads=4, vocabulary=13)
CONFIG = GPTConfig(vocab_size=13, block_size=10, n_layer=2, n_head=4, n_embd=24)
TOKENS = SHAPE.batch * SHAPE.sequence


def kept_bytes(module: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes of the distinct storages of floating values that autograd keeps of a forward; not of parameters, nor of
    autocast's copies of matrices, which are known by their shape.
    """
    storages: dict[int, int] = {}
    tensors = []  # alive until all are seen: an address may be used again
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    matrices = {p.shape for p in module.parameters() if p.dim() == 2}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        storage = tensor.untyped_storage()
        is_copy = tensor.dtype == torch.bfloat16 and not matrices.isdisjoint({tensor.shape, tensor.shape[::-1]})
        if tensor.is_floating_point() and storage.data_ptr() not in parameters and not is_copy:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tensors.append(forward())
    return sum(storages.values())


def block_bytes(precision: str, dropout: float = 0.0) -> int:
    block = Block(GPTConfig(**{**vars(CONFIG), "dropout": dropout}))
    inputs = torch.randn(SHAPE.batch, SHAPE.sequence, SHAPE.width, requires_grad=True)
    if precision == "bf16-true":
        block, inputs = block.bfloat16(), inputs.detach().bfloat16().requires_grad_()
    context = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
    with context:
        return kept_bytes(block, lambda: block(inputs))


def tensors_in(kept: Any) -> Iterator[torch.Tensor]:
    """All tensors in what a selective checkpoint has stored, whatever they are wrapped in."""
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, Mapping):
        yield from tensors_in(list(kept.values()))
    elif isinstance(kept, list | tuple):
        for part in kept:
            yield from tensors_in(part)
    elif hasattr(kept, "val"):
        yield from tensors_in(kept.val)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_block_keeps_what_autograd_keeps(precision: str) -> None:
    assert block_bytes(precision) == gpt_activations(SHAPE, precision=precision).per_block


def test_in_16_bit_norms_keep_16_bit_statistics_on_cpu() -> None:
    assert block_bytes("bf16-true") == gpt_activations(SHAPE, precision="bf16-true").per_block - 4 * TOKENS * 2


def test_dropout_on_cpu_keeps_wide_masks_and_scores() -> None:
    counted = gpt_activations(SHAPE, dropout_mask_bytes=4, keeps_scores=True)
    assert block_bytes("32-true", dropout=0.1) == counted.per_block


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_selective_recomputation_keeps_what_torch_keeps(precision: str) -> None:
    inputs = torch.randn(SHAPE.batch, SHAPE.sequence, SHAPE.width, requires_grad=True)
    contexts: list[Any] = []

    def make_contexts() -> Any:
        contexts.extend(create_selective_checkpoint_contexts(keep_expensive))
        return contexts

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        result = checkpoint(Block(CONFIG), inputs, use_reentrant=False, context_fn=make_contexts)
    assert result.shape == inputs.shape
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_in(contexts[0].storage)}
    counted = gpt_activations(SHAPE, precision=precision, recompute="selective").per_block
    assert sum(map(len, kept.values())) + 4 * inputs.numel() == counted


def test_the_rest_of_a_gpt_is_its_last_norm_and_its_loss() -> None:
    model = GPT(CONFIG)
    tokens = torch.randint(13, (SHAPE.batch, SHAPE.sequence))

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    counted = gpt_activations(SHAPE)
    # beside what is counted, cross_entropy keeps the sum of its weights, a scalar
    assert kept_bytes(model, loss) == 2 * counted.per_block + counted.outside + 4


def test_sixteen_times_the_input() -> None:
    wide = GPTShape(batch=2, sequence=8, width=4096, heads=1, vocabulary=1)
    inputs = 2 * 8 * 4096
    for precision, factor in (("32-true", 64), ("bf16-true", 32), ("bf16-mixed", 36)):
        assert gpt_activations(wide, precision=precision).per_block == pytest.approx(factor * inputs, rel=1e-3)


def test_with_scores_and_masks_it_is_the_papers_formula() -> None:
    shape = GPTShape(batch=2, sequence=2048, width=4096, heads=32, vocabulary=1)
    law = laws.transformer_layer_activation_bytes(2, 2048, 4096, 32)
    assert law == 2048 * 2 * 4096 * (34 + 80)
    counted = gpt_activations(shape, precision="bf16-true", dropout_mask_bytes=1, keeps_scores=True)
    assert counted.per_block == pytest.approx(law, rel=1e-3)
    # without scores it is their formula for recomputing these
    flash = gpt_activations(shape, precision="bf16-true", dropout_mask_bytes=1)
    assert flash.per_block == pytest.approx(2048 * 2 * 4096 * 34, rel=2e-3)


def test_full_recomputation_keeps_the_input() -> None:
    off, full = (gpt_activations(SHAPE, recompute=recompute) for recompute in ("off", "full"))
    assert full.per_block == TOKENS * SHAPE.width * 4
    assert full.per_block + full.recomputed == off.per_block
    assert (full.outside, full.loss) == (off.outside, off.loss)
    assert off.recomputed == 0


def test_selective_recomputation_keeps_what_products_give() -> None:
    """Of 16 values a token and unit of width: input, q, k, v, attention, up, and two outputs that nobody else keeps."""
    off, selective = (gpt_activations(SHAPE, recompute=recompute) for recompute in ("off", "selective"))
    unit, log_sums, statistics = TOKENS * SHAPE.width * 4, TOKENS * SHAPE.heads * 4, 4 * TOKENS * 4
    assert selective.per_block == (1 + 3 + 1 + 4 + 2) * unit + log_sums
    assert selective.recomputed == (1 + 2 + 4) * unit + statistics
    assert off.per_block == 16 * unit + log_sums + statistics


def test_tp_shares_the_insides_of_a_block() -> None:
    one, two = (gpt_activations(SHAPE, tp=tp) for tp in (1, 2))
    inside = TOKENS * 4 * (12 * SHAPE.width + SHAPE.heads)
    assert one.per_block - two.per_block == inside // 2
    assert one.outside == two.outside


def test_a_narrow_mlp_keeps_less() -> None:
    usual = gpt_activations(SHAPE).per_block
    narrow = gpt_activations(GPTShape(**{**vars(SHAPE), "mlp_width": SHAPE.width})).per_block
    assert usual - narrow == 2 * 3 * TOKENS * SHAPE.width * 4


def test_the_loss_holds_logits_twice() -> None:
    assert gpt_activations(SHAPE).loss == TOKENS * 13 * 4
    assert gpt_activations(SHAPE, precision="bf16-mixed").loss == TOKENS * 13 * (2 + 4)


def test_nothing_is_the_default() -> None:
    assert Activations() == Activations(per_block=0, recomputed=0, outside=0, loss=0)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="precision"):
        gpt_activations(SHAPE, precision="fp8")
    with pytest.raises(UnknownOptionError, match="recompute"):
        gpt_activations(SHAPE, recompute="some")
    with pytest.raises(ConfigError, match="tp=3 must divide heads=4"):
        gpt_activations(SHAPE, tp=3)
    with pytest.raises(ConfigError, match="batch must be at least 1"):
        GPTShape(batch=0, sequence=1, width=1, heads=1, vocabulary=1)
    with pytest.raises(ConfigError, match="heads=2 must divide width=3"):
        GPTShape(batch=1, sequence=1, width=3, heads=2, vocabulary=1)
