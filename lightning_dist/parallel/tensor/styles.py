"""The vocabulary of plans: what may happen to a module, the plans that come with the library, the facts of a model.

Pure: names and numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_dist.errors import ConfigError, unknown_option

COLUMN_STYLES = ("column", "fused_column")
LAYER_STYLES = (*COLUMN_STYLES, "row", "embedding", "head")
STYLES = (*LAYER_STYLES, "heads", "per_head", "replicate")

_HEADS = re.compile(r"(^|_)n?heads?($|_)")
_OF_A_HEAD = re.compile(r"(^|_)(d|dims?|size|width|features|channels|hidden|embd)($|_)")

MIXES_FEATURES = ("GLU", "Softmax", "LogSoftmax", "Softmin", "GroupNorm", "LayerNorm", "RMSNorm", "LocalResponseNorm")
"""Modules of torch without parameters, or that can be made so, in which a feature depends on others."""


def counts_heads(attribute: str) -> bool:
    """Whether an attribute is named like a number of heads: ``n_head``, ``heads``, ``num_key_value_heads``, ...

    Not like the size of one: ``head_dim``, ``d_head``.
    """
    return bool(_HEADS.search(attribute)) and not _OF_A_HEAD.search(attribute)


@dataclass(frozen=True)
class Style:
    """What happens to a module.

    Attributes:
        kind: One of :data:`STYLES`.
        parts: ``fused_column``: projections that are fused into one, each of which is split by itself; else 1.
        attributes: ``heads``: attributes to divide by the number of ranks; may be none.
    """

    kind: str
    parts: int = 1
    attributes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, pattern: str, text: object) -> Style:
        """Read what a plan says of a pattern, e.g. ``"column"``, ``"fused_column:3"``, ``"heads:n_head"``.

        Raises:
            UnknownOptionError: There is no such style.
            ConfigError: Its argument is missing or wrong.
        """
        if not isinstance(text, str):
            raise ConfigError(f"plan: {pattern!r} needs the name of a style ({', '.join(STYLES)}), got {text!r}")
        kind, colon, argument = text.partition(":")
        if kind not in STYLES:
            raise unknown_option(f"style of {pattern!r}", kind, STYLES)
        if kind == "fused_column":
            if not argument.isdecimal() or int(argument) < 2:
                raise ConfigError(
                    f"plan: {pattern!r}: {text!r}: write the number of projections that are fused into one, "
                    "2 or more, e.g. fused_column:3 for query, key and value"
                )
            return cls(kind, parts=int(argument))
        if kind == "heads":
            if not colon:
                raise ConfigError(
                    f"plan: {pattern!r}: write which attributes count heads, e.g. heads:n_head or "
                    "heads:num_heads,num_key_value_heads; heads: (nothing after the colon) leaves them all as they are"
                )
            return cls(kind, attributes=tuple(name.strip() for name in argument.split(",") if name.strip()))
        if colon:
            raise ConfigError(f"plan: {pattern!r}: {kind} takes nothing after a colon, got {text!r}; write {kind}")
        return cls(kind)

    @property
    def dim(self) -> int | None:
        """The dim of the weight that is split; ``None`` if it is whole on every rank."""
        return {"row": 1}.get(self.kind, 0) if self.kind in LAYER_STYLES else None

    def __str__(self) -> str:
        if self.kind == "heads":
            return f"heads:{','.join(self.attributes)}"
        return f"{self.kind}:{self.parts}" if self.parts > 1 else self.kind


@dataclass(frozen=True)
class Plan:
    """Patterns on dotted module paths, in the order in which they are read: of several that match, the last counts.

    Attributes:
        patterns: Pattern (as in :func:`fnmatch.fnmatchcase`; ``*`` matches dots too) -> style.
        optional: Patterns that need not match anything.
    """

    patterns: Mapping[str, str]
    optional: frozenset[str] = frozenset()


READY_PLANS: dict[str, Plan] = {
    # The GPT of examples/model.py.
    "gpt": Plan(
        {
            "*attention": "heads:n_head",
            "*attention.qkv": "fused_column:3",
            "*attention.out": "row",
            "*blocks.*.up": "column",
            "*blocks.*.down": "row",
            "*tokens": "embedding",
            "*head": "head",
        }
    ),
    # Llama, Mistral, Qwen, Gemma and their like, as Hugging Face names them.
    "huggingface": Plan(
        {
            "*self_attn": "heads:num_heads,num_attention_heads,num_key_value_heads",
            "*.q_proj": "column",
            "*.k_proj": "column",
            "*.v_proj": "column",
            "*.q_norm": "per_head",
            "*.k_norm": "per_head",
            "*.o_proj": "row",
            "*.gate_proj": "column",
            "*.up_proj": "column",
            "*.down_proj": "row",
            "*embed_tokens": "embedding",
            "*lm_head": "head",
        },
        optional=frozenset({"*self_attn", "*.q_norm", "*.k_norm", "*.gate_proj", "*embed_tokens", "*lm_head"}),
    ),
    # The MLP of examples/model.py: blocks of Sequential(Linear, activation, Linear).
    "mlp": Plan({"*blocks.*.0": "column", "*blocks.*.2": "row"}),
}
"""Plans by name; ``auto`` takes the first of which every pattern that is not optional matches a layer."""


@dataclass(frozen=True)
class ModuleFacts:
    """What a plan needs to know of a module.

    Attributes:
        path: Its dotted path.
        type_name: Its class.
        kind: ``linear``, ``embedding`` or ``other``.
        size_in: Features in; rows of an embedding; 0 for others.
        size_out: Features out; width of an embedding; 0 for others.
        obstacle: Why it cannot be split although it looks like a layer; empty if it can, or is no layer.
        own_parameters: Names of the parameters it holds itself, frozen ones too.
        numbers: Its attributes that are whole numbers.
        tied: Paths of other modules that hold one of its parameters too.
        is_container: Whether it only holds others (ModuleList, ModuleDict) and is never called.
    """

    path: str
    type_name: str = "Module"
    kind: str = "other"
    size_in: int = 0
    size_out: int = 0
    obstacle: str = ""
    own_parameters: tuple[str, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    is_container: bool = False

    @property
    def is_layer(self) -> bool:
        """Whether a layer style may be meant for it."""
        return self.kind != "other" or bool(self.obstacle)

    @property
    def owner(self) -> str:
        """Path of the module that holds it."""
        return self.path.rpartition(".")[0]

    @property
    def head_counts(self) -> dict[str, int]:
        """Its attributes that are named like numbers of heads."""
        return {name: number for name, number in self.numbers.items() if counts_heads(name)}

    @property
    def head_size(self) -> int:
        """Features of a head; 0 if it does not say."""
        return self.numbers.get("head_dim", 0)

    def __str__(self) -> str:
        sizes = f" {self.size_in} -> {self.size_out}" if self.kind != "other" else ""
        return f"{self.path or 'the model itself'} ({self.type_name}{sizes})"
