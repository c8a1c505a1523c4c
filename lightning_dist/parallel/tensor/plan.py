"""From a plan and the facts of a model to what happens to each module; pure.

Everything that can be known to be wrong is found here. What a plan may say, and what is refused: ``docs/tensor.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from lightning_dist.errors import CombinationError, ConfigError, unknown_option
from lightning_dist.parallel.tensor.styles import (
    COLUMN_STYLES,
    LAYER_STYLES,
    MIXES_FEATURES,
    READY_PLANS,
    ModuleFacts,
    Plan,
    Style,
)

_SHOWN = 30


@dataclass(frozen=True)
class Split:
    """What happens to each module.

    Attributes:
        plan: Name of the plan; ``custom`` for one the user wrote.
        size: Ranks that share each layer.
        layers: Path of a layer -> its style, one of :data:`LAYER_STYLES`.
        heads: Path -> attribute -> number of heads on each rank.
        per_head: Modules whose parameters are whole on each rank and applied to each rank's own heads.
        replicated: Modules that are declared to work on whole activations.
    """

    plan: str
    size: int
    layers: Mapping[str, Style]
    heads: Mapping[str, Mapping[str, int]]
    per_head: frozenset[str]
    replicated: frozenset[str]

    @property
    def has_head(self) -> bool:
        """Whether a layer computes logits of which each rank has a part."""
        return any(style.kind == "head" for style in self.layers.values())

    def describe(self) -> str:
        """One line: ``tensor parallel over 2 ranks, plan gpt: 4 column, 4 row, 1 embedding, 1 head``."""
        kinds = [style.kind for style in self.layers.values()]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in LAYER_STYLES if kind in kinds)
        return f"tensor parallel over {self.size} ranks, plan {self.plan}: {counted}"


def split_model(modules: Sequence[ModuleFacts], *, size: int, plan: str | Mapping[str, str] = "auto") -> Split:
    """Apply a plan to the facts of a model.

    Args:
        modules: In the order of ``named_modules``.
        size: Ranks that share each layer.
        plan: ``auto``, the name of a ready plan, or pattern -> style.

    Raises:
        UnknownOptionError: There is no such plan or style.
        ConfigError: A pattern matches nothing, a layer is of the wrong kind, or it is open what becomes of a module.
        CombinationError: A number of features, rows or heads cannot be divided by ``size``, or tied layers disagree.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"tensor parallel size is a number of ranks, 1 or more, got {size!r}")
    name, chosen = _choose(modules, plan)
    assigned: dict[str, Style] = {}
    heads: dict[str, Style] = {}
    for pattern, text in chosen.patterns.items():
        style = Style.parse(pattern, text)
        for facts in _matches(modules, pattern, style, is_optional=pattern in chosen.optional):
            (heads if style.kind == "heads" else assigned)[facts.path] = style
    by_path = {facts.path: facts for facts in modules}
    layers = {path: style for path, style in assigned.items() if style.kind in LAYER_STYLES}
    per_head = frozenset(path for path, style in assigned.items() if style.kind == "per_head")
    replicated = frozenset(path for path, style in assigned.items() if style.kind == "replicate")
    for path, style in layers.items():
        _check_layer(by_path[path], style, size)
        _check_tied(by_path[path], style, layers)
    _check_owners(by_path, layers, heads, declared=per_head | replicated)
    _check_heads(by_path, layers, size)
    _check_between(modules, layers)
    if not layers:
        raise ConfigError(f"plan {name} splits no layer; {_layers_of(modules)}")
    _check_pairs(layers)
    divided = {path: _divide(by_path[path], style, size) for path, style in heads.items()}
    return Split(name, size, layers, {path: values for path, values in divided.items() if values}, per_head, replicated)


def _choose(modules: Sequence[ModuleFacts], plan: object) -> tuple[str, Plan]:
    if isinstance(plan, Mapping):
        if not plan:
            raise ConfigError(f"the plan is empty; {_layers_of(modules)}")
        for pattern in plan:
            if not isinstance(pattern, str):
                raise ConfigError(f"plan: a pattern is a string with wildcards, got {pattern!r}")
        return "custom", Plan(plan)
    if plan == "auto":
        for name, ready in READY_PLANS.items():
            needed = {p: Style.parse(p, s) for p, s in ready.patterns.items() if p not in ready.optional}
            if all(_candidates(modules, pattern, style) for pattern, style in needed.items()):
                return name, ready
        raise ConfigError(
            f"plan=auto: no ready plan ({', '.join(READY_PLANS)}) matches this model; write one: pattern -> style, "
            f'e.g. {{"*.up": "column", "*.down": "row"}}. {_layers_of(modules)}'
        )
    if isinstance(plan, str):
        if plan not in READY_PLANS:
            raise unknown_option("plan", plan, ("auto", *READY_PLANS))
        return plan, READY_PLANS[plan]
    raise ConfigError(
        f"plan is auto, {', '.join(READY_PLANS)}, or a mapping of pattern to style, got {type(plan).__name__}"
    )


def _candidates(modules: Iterable[ModuleFacts], pattern: str, style: Style) -> list[ModuleFacts]:
    """What a pattern can mean: layers, modules with the attributes it names, or modules with parameters."""
    matched = [facts for facts in modules if fnmatchcase(facts.path, pattern)]
    if style.kind in LAYER_STYLES:
        return [facts for facts in matched if facts.is_layer]
    if style.kind == "heads" and style.attributes:
        return [facts for facts in matched if any(name in facts.numbers for name in style.attributes)]
    if style.kind in ("per_head", "replicate"):
        return [facts for facts in matched if facts.own_parameters or facts.is_layer]
    return matched


def _matches(modules: Sequence[ModuleFacts], pattern: str, style: Style, *, is_optional: bool) -> list[ModuleFacts]:
    found = _candidates(modules, pattern, style)
    if found or is_optional:
        return found
    others = [str(facts) for facts in modules if fnmatchcase(facts.path, pattern)]
    if not others:
        raise ConfigError(f"plan: {pattern!r} matches no module; {_layers_of(modules)}")
    if style.kind in ("per_head", "replicate"):
        raise ConfigError(f"plan: {pattern!r}: {style} is for parameters, and {_some(others)} has none of its own")
    if style.kind == "heads":
        raise ConfigError(
            f"plan: {pattern!r}: {style}: none of {_some(others)} has a whole number in such an attribute; "
            "name attributes of the modules that the pattern matches"
        )
    raise ConfigError(
        f"plan: {pattern!r}: {style} is for layers, but it matches only {_some(others)}; {_layers_of(modules)}"
    )


def _check_layer(facts: ModuleFacts, style: Style, size: int) -> None:
    if facts.obstacle:
        raise ConfigError(f"plan: {style} cannot split {facts}: {facts.obstacle}")
    wanted = "embedding" if style.kind == "embedding" else "linear"
    if facts.kind != wanted:
        instead = "embedding" if facts.kind == "embedding" else "column, row, fused_column:N or head"
        raise ConfigError(f"plan: {facts}: {style} is for layers of kind {wanted}; write {instead}, or replicate")
    what, number = _what_is_split(facts, style)
    if number % (style.parts * size):
        parts = f" in each of {style.parts} parts" if style.parts > 1 else ""
        step = style.parts * size
        rounded = -(-number // step) * step
        raise CombinationError(
            f"plan: {facts}: {style} splits its {number} {what}{parts} over {size} ranks, which leaves a rest; "
            f"make it {rounded}, take a size that divides, or write 'replicate' for it"
        )


def _what_is_split(facts: ModuleFacts, style: Style) -> tuple[str, int]:
    if style.kind == "row":
        return "features in", facts.size_in
    if style.kind == "embedding":
        return "rows", facts.size_in
    return "features out", facts.size_out


def _check_tied(facts: ModuleFacts, style: Style, layers: Mapping[str, Style]) -> None:
    for other in facts.tied:
        theirs = layers.get(other)
        if theirs is None or (theirs.dim, theirs.parts) != (style.dim, style.parts):
            raise CombinationError(
                f"plan: {facts} shares a parameter with {other}, so both must be split alike, but the one is {style}, "
                f"the other {'whole' if theirs is None else theirs}; write embedding and head for an embedding "
                "tied to the output layer, or replicate for both"
            )


def _check_owners(
    modules: Mapping[str, ModuleFacts],
    layers: Mapping[str, Style],
    heads: Mapping[str, Style],
    *,
    declared: frozenset[str],
) -> None:
    """What a module that holds column layers does by itself must be known: it sees a part of their features only."""
    for path, style in layers.items():
        owner = _caller_of(modules[path], modules, layers)
        if owner is None or style.kind not in COLUMN_STYLES:
            continue
        if owner.head_counts and owner.path not in heads:
            names = ",".join(owner.head_counts)
            raise ConfigError(
                f"plan: {owner} holds {path} ({style}) and counts heads in {names}, of which each rank has a part "
                f"only; write {{{owner.path!r}: 'heads:{names}'}} to give each rank its own number, or "
                f"{{{owner.path!r}: 'heads:'}} if its code does not use them to cut features"
            )
        if owner.own_parameters and owner.path not in declared:
            raise ConfigError(
                f"plan: {owner} holds {path} ({style}) and parameters of its own ({', '.join(owner.own_parameters)}); "
                f"write {{{owner.path!r}: 'per_head'}} if they are applied to features that are split (each rank's "
                f"heads), {{{owner.path!r}: 'replicate'}} if not"
            )


def _caller_of(
    facts: ModuleFacts, modules: Mapping[str, ModuleFacts], layers: Mapping[str, Style]
) -> ModuleFacts | None:
    """The module whose code calls a layer and sees its output: not a ModuleList, nor a Sequential that it ends."""
    owner = modules.get(facts.owner)
    while owner is not None and owner.path:
        last = [path for path in layers if modules[path].owner == owner.path][-1:]
        passes_on = owner.type_name == "Sequential" and (not last or last == [facts.path])
        if not (owner.is_container or passes_on):
            return owner
        owner = modules.get(owner.owner)
    return owner


def _check_between(modules: Sequence[ModuleFacts], layers: Mapping[str, Style]) -> None:
    """In a Sequential it can be seen what takes split features: it must treat each feature by itself."""
    for path in (facts.path for facts in modules if facts.type_name == "Sequential"):
        opened: tuple[str, Style] | None = None
        for facts in modules:
            if facts.owner != path or not facts.path:
                continue
            style = layers.get(facts.path)
            if style is not None:
                opened = (facts.path, style) if style.kind in COLUMN_STYLES else None
            elif opened is not None and facts.type_name in MIXES_FEATURES:
                _refuse_between(facts, *opened)


def _refuse_between(facts: ModuleFacts, column: str, style: Style) -> None:
    if facts.type_name == "GLU":
        if style.parts == 2:
            return
        instead = f"{{{column!r}: 'fused_column:2'}}, which gives each rank a part of both halves"
    else:
        instead = f"'replicate' for {column} and for the row layer after it"
    raise CombinationError(
        f"plan: {facts} comes after {column} ({style}), of whose features each rank has a part, and what it makes of a "
        f"feature depends on others; write {instead}"
    )


def _check_heads(modules: Mapping[str, ModuleFacts], layers: Mapping[str, Style], size: int) -> None:
    """Where a module says how many features a head has, no head may be cut."""
    for path, style in layers.items():
        owner = _caller_of(modules[path], modules, layers)
        features = modules[path].size_out // style.parts
        if owner is None or style.kind not in COLUMN_STYLES or not owner.head_size or features % owner.head_size:
            continue
        num_heads = features // owner.head_size
        if num_heads % size:
            raise CombinationError(
                f"plan: {modules[path]} has {num_heads} heads of {owner.head_size} features, which cannot be dealt to "
                f"{size} ranks; take a size that divides {num_heads}"
            )


def _divide(facts: ModuleFacts, style: Style, size: int) -> dict[str, int]:
    divided = {}
    for name in style.attributes:
        number = facts.numbers.get(name)
        if number is None:
            continue
        if number % size:
            raise CombinationError(
                f"plan: {facts}: {name}={number} heads cannot be dealt to {size} ranks; take a size that divides "
                f"{number}, or leave its layers out of the plan"
            )
        divided[name] = number // size
    return divided


def _check_pairs(layers: Mapping[str, Style]) -> None:
    columns = [path for path, style in layers.items() if style.kind in COLUMN_STYLES]
    rows = [path for path, style in layers.items() if style.kind == "row"]
    if columns and not rows:
        raise ConfigError(
            f"plan: the output of {_some(columns)} is split, and no row layer takes it; write row for the layer that "
            "comes after, e.g. the attention's output projection"
        )
    if rows and not columns:
        raise ConfigError(
            f"plan: {_some(rows)} would take features that are split, and no column layer makes them; write column for "
            "the layer that comes before"
        )


def _layers_of(modules: Iterable[ModuleFacts]) -> str:
    """The layers of a model for a message, those alike but for an index in one."""
    counted: dict[str, int] = {}
    for facts in modules:
        if facts.is_layer:
            line = str(replace(facts, path=re.sub(r"(?<![^.])\d+(?![^.])", "*", facts.path)))
            line += f" [{facts.obstacle}]" if facts.obstacle else ""
            counted[line] = counted.get(line, 0) + 1
    listed = [f"{line} x{number}" if number > 1 else line for line, number in counted.items()]
    return f"the layers of this model are: {_some(listed)}" if listed else "this model has no Linear and no Embedding"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
