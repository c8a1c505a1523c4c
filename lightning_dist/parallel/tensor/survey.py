"""The facts of a model that a plan is checked against."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_dist.parallel.tensor.styles import ModuleFacts


def survey(model: nn.Module) -> tuple[ModuleFacts, ...]:
    """Describe the modules of a model, each once, in the order of ``named_modules``; nothing is read of its values."""
    modules = dict(model.named_modules())
    holders: dict[int, list[str]] = {}
    for path, module in modules.items():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(path)
    return tuple(_facts(path, module, modules, holders) for path, module in modules.items())


def _facts(path: str, module: nn.Module, modules: dict[str, nn.Module], holders: dict[int, list[str]]) -> ModuleFacts:
    own = dict(module.named_parameters(recurse=False))
    kind, size_in, size_out = "other", 0, 0
    if isinstance(module, nn.Linear):
        kind, size_in, size_out = "linear", module.in_features, module.out_features
    elif isinstance(module, nn.Embedding):
        kind, size_in, size_out = "embedding", module.num_embeddings, module.embedding_dim
    others = [other for parameter in own.values() for other in holders[id(parameter)] if other != path]
    return ModuleFacts(
        path=path,
        type_name=type(module).__name__,
        kind=kind,
        size_in=size_in,
        size_out=size_out,
        obstacle=_obstacle(module, modules.get(path.rpartition(".")[0])),
        own_parameters=tuple(own),
        numbers={name: value for name, value in vars(module).items() if type(value) is int},
        is_container=isinstance(module, nn.ModuleList | nn.ModuleDict),
        tied=tuple(dict.fromkeys(others)),
    )


def _obstacle(module: nn.Module, owner: nn.Module | None) -> str:
    """Why a module cannot be split although a plan may name it as a layer; empty if it can, or is no layer."""
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return (
            "its weight is that of a Linear transposed, and code around it cuts its output by fixed sizes; replace it "
            "by nn.Linear, or take a model of another family"
        )
    if not isinstance(module, nn.Linear | nn.Embedding):
        return ""
    if isinstance(owner, nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention uses the weights of its layers without calling them; write attention with Linear "
            "layers and F.scaled_dot_product_attention"
        )
    if parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization; remove it first (torch.nn.utils.parametrize)"
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if "weight" not in own:
        return (
            f"its weight is made of {', '.join(own) or 'something else'} by a hook (weight_norm, spectral_norm, "
            "prune); remove the hook first, e.g. torch.nn.utils.remove_weight_norm"
        )
    if others := [name for name in own if name not in ("weight", "bias")]:
        return (
            f"it has parameters of its own beside weight and bias ({', '.join(others)}), of which it is not known how "
            "they are split; hold them in a module around it"
        )
    parameters = tuple(module.parameters(recurse=False))
    if any(is_lazy(parameter) for parameter in parameters):
        return "its size is not known before its first forward; give it its sizes"
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return "it is distributed already; tensor parallelism comes first, sharding over the data axes after it"
    if any(parameter.is_meta for parameter in parameters):
        return "it has no values yet (meta device); materialise it first"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "max_norm changes rows in forward, which works on whole embeddings only; drop max_norm"
    if isinstance(module, nn.Embedding) and module.sparse:
        return "sparse gradients work on whole embeddings only; drop sparse=True"
    return ""
