"""Which submodules of a model are its blocks: the units of sharding, of recomputation and of pipelines.

A block is one of a class that is repeated in a container (a transformer's layers), or what the user names, or a module
outside of these that holds much of the whole (a large embedding). What is left belongs to the root.

Note [What a module tree does not say]
    Blocks are found by structure, not by running the model. Whether a module is called through its ``forward`` cannot
    be seen: an embedding whose weight is also used by ``F.linear``, or a child of a ModuleList whose parts are called
    one by one, looks like any other. Sharding and recomputation act around ``forward``, so name the blocks of such a
    model. Frozen modules are blocks like others; modules without parameters are blocks only if they are named.

Note [One owner]
    FSDP2 refuses a parameter that two groups manage. A module that shares a parameter with anything outside itself is
    therefore no block, unless ``exclusive`` is false (recomputation does not mind).
"""

from __future__ import annotations

import enum
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.module_tree import (
    COMPILED,
    ModuleTree,
    class_of,
    has_forward,
    has_parts,
    join,
    numel_of,
    uncompiled,
)

SIZE_FRACTION = 0.1  # of all parameters: what holds more than this outside of blocks becomes a unit of its own
CHILDLESS_FRACTION = 0.01  # repeated modules without children (norms, small heads) together hold more, or are no blocks

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class BlockKind(str, enum.Enum):
    """Why a module is a block."""

    REPEATED = "repeated"
    NAMED = "named"
    SIZE = "by size"


@dataclass(frozen=True)
class Block:
    """A submodule that is treated as one.

    Attributes:
        name: Dotted path from the model; the first, if the module occurs at several.
        module: The module; torch.compile's wrapper, if it has one.
        numel: Elements of its own parameters, each counted once, without those of blocks inside it.
        kind: Why it is a block.
        reason: The same in words, e.g. ``"repeated: 6 x Block in model.blocks"``.
    """

    name: str
    module: nn.Module
    numel: int
    kind: BlockKind
    reason: str


@dataclass(frozen=True)
class Survey:
    """What was found in a model.

    Attributes:
        blocks: In the order of the model's definition, but a block comes after those inside it.
        left_out: A sentence for each module that would be a block but for a parameter it shares.
        numel: Elements of all parameters of the model.
    """

    blocks: tuple[Block, ...]
    left_out: tuple[str, ...]
    numel: int


def find_blocks(
    model: nn.Module, *, named: Sequence[str] = (), size_fraction: float = SIZE_FRACTION, exclusive: bool = True
) -> tuple[Block, ...]:
    """The blocks of a model; :func:`survey_blocks` says in addition what was left out.

    They come in the order of the model's definition, but a block after those inside it (only names make such), so that
    they can be sharded in this order.

    Args:
        model: Any module; parameters may be on the meta device, submodules compiled or sharded already.
        named: Class names, or dotted paths in which ``*`` stands for (part of) one name: ``model.blocks.*`` are the
            children of ``model.blocks``, not what is in them. Exactly these are the blocks.
        size_fraction: Part of all parameters above which a module outside of repeated blocks is a unit of its own.
        exclusive: Whether a block must be the only user of its parameters. See Note [One owner].

    Raises:
        ConfigError: A name matches nothing, or what can be no block; the message lists what could be named.
    """
    return survey_blocks(model, named=named, size_fraction=size_fraction, exclusive=exclusive).blocks


def survey_blocks(
    model: nn.Module, *, named: Sequence[str] = (), size_fraction: float = SIZE_FRACTION, exclusive: bool = True
) -> Survey:
    """As :func:`find_blocks`, with what was left out.

    Without names, children of a ModuleList, Sequential or ModuleDict are blocks if they hold parameters and there are
    at least two of their class in it. The outermost container counts, but a Sequential that itself holds repeated
    modules made of parts (a stage of layers) is looked into, as is a ModuleList or ModuleDict, which has no forward.
    """
    tree = ModuleTree(model)
    left_out: list[str] = []
    if named:
        reasons = _named(tree, (named,) if isinstance(named, str) else named, exclusive=exclusive)
    else:
        reasons, tied = _repeated(tree, exclusive=exclusive)
        left_out = list(tied.values())
        reasons |= _by_size(tree, {*reasons, *tied}, size_fraction=size_fraction, exclusive=exclusive)
    blocks = [
        Block(paths[0], module, _own_numel(module, reasons), *reasons[module])
        for module, paths in tree.paths.items()
        if module in reasons
    ]
    return Survey(tuple(_inner_first(blocks)), tuple(left_out), tree.numel)


def without_parameters(survey: Survey, left_out: Set[nn.Parameter]) -> Survey:
    """The blocks that have other parameters than some, which are not counted."""
    kept = [block for block in survey.blocks if set(block.module.parameters()) - left_out]
    modules = [block.module for block in kept]
    blocks = tuple(replace(block, numel=_own_numel(block.module, modules, but=left_out)) for block in kept)
    return replace(survey, blocks=blocks, numel=survey.numel - sum(parameter.numel() for parameter in left_out))


def describe_blocks(survey: Survey) -> str:
    """The choice as lines of text: neighbours with one reason share a line, what was left out follows."""
    held = sum(block.numel for block in survey.blocks)
    count = f"{len(survey.blocks)} block{'s' if len(survey.blocks) != 1 else ''}"
    lines = [f"{count} with {_count(held)} of {_count(survey.numel)} parameters"]
    for reason, group in groupby(survey.blocks, key=lambda block: block.reason):
        blocks = list(group)
        sizes = sorted({block.numel for block in blocks})
        size = _count(sizes[0]) if len(sizes) == 1 else f"{_count(sizes[0])} to {_count(sizes[-1])}"
        each = " each" if len(blocks) > 1 else ""
        lines.append(f"  {spans(block.name for block in blocks)}: {reason}, {size}{each}")
    lines.append(f"  the rest: {_count(survey.numel - held)}")
    lines += [f"  left out: {sentence}" for sentence in survey.left_out]
    return "\n".join(lines)


def spans(names: Iterable[str]) -> str:
    """Dotted names in short: numbers that follow each other become a span, ``blocks.0-5, head``."""
    runs: list[tuple[str, int | None, int | None]] = []
    for name in names:
        prefix, _, last = name.rpartition(".")
        if not last.isdecimal():
            runs.append((name, None, None))
        elif runs and runs[-1][0] == prefix and runs[-1][2] == int(last) - 1:
            runs[-1] = (prefix, runs[-1][1], int(last))
        else:
            runs.append((prefix, int(last), int(last)))
    return ", ".join(
        prefix if low is None else join(prefix, str(low) if low == high else f"{low}-{high}")
        for prefix, low, high in runs
    )


_Reasons = dict[nn.Module, tuple[BlockKind, str]]


@dataclass(frozen=True)
class _Group:
    """Children of one class in one container, by position: a module may occur more than once."""

    container: str
    kind: type[nn.Module]
    members: tuple[tuple[str, nn.Module], ...]

    def __str__(self) -> str:
        count = f"{len(self.members)} x {self.kind.__name__} in {self.container or 'the model'}"
        distinct = len({module for _, module in self.members})
        return count if distinct == len(self.members) else f"{count} ({distinct} of them distinct)"


# -- repeated


def _repeated(tree: ModuleTree, *, exclusive: bool) -> tuple[_Reasons, dict[nn.Module, str]]:
    """Blocks with their reasons, and modules that share a parameter with the sentence that says so."""
    reasons: _Reasons = {}
    tied: dict[nn.Module, str] = {}
    for group in _groups(tree, tree.model, "", set()):
        for path, module in group.members:
            if module in reasons or module in tied:
                continue
            shared = tree.shared(module) if exclusive else None
            if shared is None:
                reasons[module] = BlockKind.REPEATED, f"repeated: {group}"
            else:
                inside, outside = shared
                tied[module] = f"{path} ({group.kind.__name__}), since {inside} is also {outside}"
    return reasons, tied


def _groups(tree: ModuleTree, module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[_Group]:
    if module in seen:
        return
    seen.add(module)
    taken: set[nn.Module] = set()
    if isinstance(module, _CONTAINERS):
        for group in _groups_of(tree, module, path):
            taken.update(member for _, member in group.members)
            yield group
    for name, child in module.named_children():
        if child not in taken:
            yield from _groups(tree, child, join(path, name), seen)


def _groups_of(tree: ModuleTree, container: nn.Module, path: str) -> Iterator[_Group]:
    by_class: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for name, child in _children(container):
        if has_forward(child) and not _is_stage(child):
            by_class.setdefault(class_of(child), []).append((join(path, name), child))
    for kind, members in by_class.items():
        modules = {module for _, module in members}
        is_small = sum(numel_of(module) for module in modules) <= CHILDLESS_FRACTION * tree.numel
        if len(members) > 1 and not (is_small and not any(has_parts(module) for module in modules)):
            yield _Group(path, kind, tuple(members))


def _is_stage(module: nn.Module) -> bool:
    """Whether it is a Sequential that holds blocks of its own, at any depth of containers."""
    module = uncompiled(module)
    if not isinstance(module, _CONTAINERS):
        return False
    children = [child for _, child in _children(module)]
    made_of_parts = Counter(
        class_of(child) for child in children if has_parts(child) and not isinstance(uncompiled(child), _CONTAINERS)
    )
    return any(count > 1 for count in made_of_parts.values()) or any(_is_stage(child) for child in children)


def _children(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that hold parameters, by position."""
    return [(name, child) for name, child in container._modules.items() if child is not None and numel_of(child)]


# -- by size


def _by_size(tree: ModuleTree, settled: set[nn.Module], *, size_fraction: float, exclusive: bool) -> _Reasons:
    """Modules that hold much, outside of those that are settled (blocks, and what must stay with the root)."""
    least = size_fraction * tree.numel

    def look(parent: nn.Module) -> _Reasons:
        found: _Reasons = {}
        if isinstance(parent, nn.MultiheadAttention):
            return found  # it reads the weights of its parts without calling them
        for name, child in parent.named_children():
            numel = numel_of(child)
            if child in settled or child in found or numel <= least:
                continue
            if name == COMPILED or not can_be_unit(child, numel):
                found |= look(child)
            elif numel > tree.numel / 2 and (parts := look(child)):
                found |= parts  # half of the model is no unit to gather at once if it has large parts
            else:
                found[child] = BlockKind.SIZE, f"by size: {numel / tree.numel:.0%} of the parameters"
        return found

    def can_be_unit(module: nn.Module, numel: int) -> bool:
        if numel == tree.numel or not has_forward(module) or not settled.isdisjoint(module.modules()):
            return False
        return not (exclusive and tree.shared(module))

    return look(tree.model)


# -- named


def _named(tree: ModuleTree, names: Sequence[str], *, exclusive: bool) -> _Reasons:
    reasons: _Reasons = {}
    by_path: dict[nn.Module, str] = {}
    for name in names:
        matches = list(_matches(tree, name))
        if not matches:
            raise ConfigError(f"{name!r} names no module of {type(tree.model).__name__}. {_offer(tree)}")
        for path, module, by_class in matches:
            _check_block(tree, path, module, exclusive=exclusive)
            if not by_class and path == name and by_path.setdefault(module, name) != name:
                raise ConfigError(
                    f"{by_path[module]} and {name} are one module, which is used twice: name only one of them"
                )
            what = f"class {class_of(module).__name__}" if by_class else name
            reasons.setdefault(module, (BlockKind.NAMED, f"named: {what}"))
    return reasons


def _matches(tree: ModuleTree, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Path, module and whether it is its class that is named; the inside of torch.compile's wrapper does not count."""
    pattern = name.split(".")
    for module, paths in tree.paths.items():
        for path in paths:
            if not path or path.rpartition(".")[2] == COMPILED:
                continue
            plain = [part for part in path.split(".") if part != COMPILED]
            if class_of(module).__name__ == name:
                yield path, module, True
            elif _fits(path.split("."), pattern) or _fits(plain, pattern):
                yield path, module, False


def _fits(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))


def _check_block(tree: ModuleTree, path: str, module: nn.Module, *, exclusive: bool) -> None:
    if not has_forward(module):
        raise ConfigError(
            f"{path} is a {class_of(module).__name__}, which has no forward of its own: name its children, {path}.*"
        )
    if exclusive and (shared := tree.shared(module)):
        raise ConfigError(
            f"{path} can be no block of its own: its {shared[0]} is also {shared[1]}. Name the module that holds both, "
            "or leave it to the root"
        )


def _offer(tree: ModuleTree) -> str:
    groups = sorted({re.sub(r"\.\d+\b", ".*", str(group)) for group in _groups(tree, tree.model, "", set())})
    containers = sorted(
        {
            re.sub(r"\.\d+\b", ".*", f"{paths[0]}.*")
            for module, paths in tree.paths.items()
            if paths[0] and isinstance(module, _CONTAINERS)
        }
    )
    classes = sorted({class_of(module).__name__ for module in tree.paths if has_parts(module)})
    return (
        f"Repeated: {', '.join(groups) or 'none'}; containers: {', '.join(containers) or 'none'}; "
        f"other classes made of parts: {', '.join(classes) or 'none'}. A name is a class, or a dotted path in which * "
        "stands for one name"
    )


# -- text and sizes


def _inner_first(blocks: Sequence[Block]) -> Iterator[Block]:
    around: list[Block] = []
    for block in blocks:
        while around and not block.name.startswith(f"{around[-1].name}."):
            yield around.pop()
        around.append(block)
    yield from reversed(around)


def _own_numel(module: nn.Module, blocks: Iterable[nn.Module], *, but: Set[nn.Parameter] = frozenset()) -> int:
    inner = set(blocks) & set(module.modules()) - {module}
    theirs = {parameter for block in inner for parameter in block.parameters()} | but
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in theirs)


def _count(number: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
