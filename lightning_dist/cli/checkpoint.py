"""``hierdist checkpoint``: what checkpoints there are, what is in them, whether they are whole, and exports."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_dist.checkpoint import catalog, leases, tables
from lightning_dist.checkpoint.compare import compare
from lightning_dist.checkpoint.export import Exported, export_safetensors
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.messages import NoKeeperError
from lightning_dist.checkpoint.keeper.summary import summarize
from lightning_dist.checkpoint.retention import Candidate, Keep, to_delete
from lightning_dist.checkpoint.storage import Folder, open_folder
from lightning_dist.checkpoint.whole import export_sharded_safetensors, export_sharded_torch
from lightning_dist.cli.command import Command
from lightning_dist.cli.storage_options import add_storage_options, storage_options
from lightning_dist.errors import CheckpointError, ConfigError, ForeignCheckpointError
from lightning_dist.modes import whole_checkpoints

_TORCH_ENDINGS = (".ckpt", ".pt", ".pth")
_SAFETENSORS = ".safetensors"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    listed = actions.add_parser("ls", help="List the checkpoints of a folder, and what is wrong with them.")
    _add_root(listed)
    show = actions.add_parser("show", help="Show what a checkpoint holds: names, shapes, types, who wrote what.")
    _add_one(show, "checkpoint")
    verify = actions.add_parser("verify", help="Read all bytes and compare checksums; exit status 1 if they differ.")
    verify.add_argument("path", help="a checkpoint, or a folder of checkpoints")
    add_storage_options(verify)
    verify.add_argument("--fast", action="store_true", help="compare sizes only")
    diff = actions.add_parser("diff", help="Compare two checkpoints; exit status 1 if they differ.")
    _add_one(diff, "first")
    diff.add_argument("second", help="another; its world size and layout do not matter")
    diff.add_argument("--no-values", action="store_true", help="compare names, shapes and types only")
    prune = actions.add_parser("prune", help="Delete old checkpoints; the newest, and those being read, stay.")
    _add_root(prune)
    prune.add_argument("--keep-last", type=int, default=1, metavar="N", help="keep the N newest (default: 1)")
    prune.add_argument("--keep-best", type=int, default=0, metavar="N", help="keep the N best by --monitor too")
    prune.add_argument("--monitor", metavar="KEY", help="key of the record that --keep-best ranks by")
    prune.add_argument("--mode", choices=("min", "max"), default="min", help="whether lower or higher is better")
    prune.add_argument("--torn", action="store_true", help="delete what is not whole too; no save may be under way")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    keepers = actions.add_parser("keepers", help="List the processes that keep checkpoints in memory on this host.")
    keepers.add_argument("root", nargs="?", help="only that of the checkpoints in this folder: a path or a URL")
    keepers.add_argument("--end", action="store_true", help="end those that no run uses; what they hold is gone")
    keepers.add_argument("--force", action="store_true", help="with --end: those that a run uses, too")
    export = actions.add_parser(
        "export",
        help="Write one file: safetensors, or Lightning's, with all that resuming needs, if it is .ckpt.",
    )
    export.add_argument("checkpoint", help="a sharded checkpoint, or a file that Trainer.save_checkpoint has written")
    export.add_argument("output", type=Path, help="the file to write, e.g. model.safetensors or model.ckpt")
    export.add_argument("--prefix", default="", help="keep only tensors whose names begin so, without it, e.g. model/")
    export.add_argument(
        "--weights-only", action="store_true", help="of a .ckpt, leave out optimizers, schedulers and callbacks"
    )
    add_storage_options(export)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="a folder of checkpoints: a path or a URL (s3://, gs://, ...)")
    add_storage_options(parser)


def _add_one(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(name, help="a checkpoint: a path or a URL")
    add_storage_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    return _ACTIONS[arguments.action](arguments)


def _ls(arguments: argparse.Namespace) -> int:
    root = _folder(arguments.root, arguments)
    found = catalog.survey(root)
    if not found:
        raise CheckpointError(f"{root.url} holds no sharded checkpoints")
    _print(tables.of_folder(found, root.url))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    _print(*tables.of_checkpoint(catalog.open_checkpoint(_folder(arguments.checkpoint, arguments))))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    folder, full = _folder(arguments.path, arguments), not arguments.fast
    found = catalog.survey(folder, full=full)
    if found:
        _print(tables.of_folder(found, folder.url))
        return int(any(entry.problem is not None for entry in found))
    try:
        with leases.leased(catalog.open_checkpoint(folder).folder):
            checkpoint = catalog.open_checkpoint(folder, full=full)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    files, size = len(checkpoint.manifest.files), tables.size_text(checkpoint.manifest.size_bytes)
    print(f"{folder.url}: {files} files, {size}: {'as written' if full else 'all there'}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    first = catalog.open_checkpoint(_folder(arguments.first, arguments))
    second = catalog.open_checkpoint(_folder(arguments.second, arguments))
    with leases.leased(first.folder), leases.leased(second.folder):
        differences = compare(first, second, values=not arguments.no_values)
    if differences:
        _print(tables.of_differences(differences))
        return 1
    print("no differences")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    if arguments.keep_best and not arguments.monitor:
        raise ConfigError("--keep-best needs --monitor, the key of the record to rank by, e.g. --monitor val_loss")
    keep = Keep(last=arguments.keep_last, best=arguments.keep_best, mode=arguments.mode)
    root = _folder(arguments.root, arguments)
    found = catalog.survey(root)
    whole = [entry for entry in found if entry.problem is None and entry.checkpoint is not None]
    read = {entry.name: who for entry in found if (who := leases.readers(entry.folder))}
    names = to_delete([_candidate(entry, arguments.monitor) for entry in whole], keep, in_use=read)
    if arguments.torn:
        names += [entry.name for entry in found if _is_torn(entry.problem) and entry.name not in read]
    for name in names:
        if not arguments.dry_run:
            leases.forget(root.child(name))
            catalog.delete(root, name)
        print(f"{'would delete' if arguments.dry_run else 'deleted'} {root.url.rstrip('/')}/{name}")
    for name, who in read.items():
        print(f"kept {root.url.rstrip('/')}/{name}: read by {', '.join(who)}")
    left = len(found) - len(names)
    print(f"{len(names)} of {len(found)}, {left} left")
    return 0


def _is_torn(problem: CheckpointError | None) -> bool:
    """Whether nobody can use it; another release can use one of another version."""
    return problem is not None and not isinstance(problem, ForeignCheckpointError)


def _keepers(arguments: argparse.Namespace) -> int:
    if arguments.force and not arguments.end:
        raise ConfigError("--force is for --end: write hierdist checkpoint keepers --end --force")
    if arguments.root is None:
        found = client.running()
    else:
        root = arguments.root if "://" in arguments.root else os.path.abspath(arguments.root)
        own = client.find(client.name_of(root.rstrip("/")))
        found = [] if own is None else [own]
    summaries = summarize(found)
    if not summaries:
        print("no keeper runs on this host" + ("" if arguments.root is None else f" for {arguments.root}"))
        return 0
    if not arguments.end:
        _print(tables.of_keepers(summaries, time.time()))
        return 0
    for each in summaries:
        which = f"process {each.process}, which keeps {tables.size_text(each.used_bytes)} of {each.job}"
        if each.ranks and not arguments.force:
            print(f"kept {which}: {each.ranks} ranks use it; --force ends it, too, and they go on without")
        else:
            with contextlib.suppress(NoKeeperError):  # it has ended
                each.keeper.end()
            print(f"ended {which}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    checkpoint, output, prefix = arguments.checkpoint, arguments.output, arguments.prefix
    is_torch = output.suffix in _TORCH_ENDINGS
    if not is_torch and output.suffix != _SAFETENSORS:
        raise ConfigError(
            f"{output} is of no format that is written: name it {_SAFETENSORS}, or {', '.join(_TORCH_ENDINGS)}"
        )
    if arguments.weights_only and (prefix or not is_torch):
        raise ConfigError(
            "--weights-only is for Lightning's file: with --prefix, and in safetensors, there are tensors only; leave "
            "it out"
        )
    if "://" not in checkpoint and not Path(checkpoint).is_dir():
        if is_torch:
            raise ConfigError(f"{checkpoint} is one file already: write e.g. {output.with_suffix('.safetensors')}")
        exported = export_safetensors(Path(checkpoint), output, prefix=prefix)
    else:
        opened = catalog.open_checkpoint(_folder(checkpoint, arguments))
        with leases.leased(opened.folder):
            if is_torch and not prefix:
                exported = whole_checkpoints.export(opened, output, weights_only=arguments.weights_only)
            else:
                export = export_sharded_torch if is_torch else export_sharded_safetensors
                exported = export(opened, output, prefix=prefix)
    Console().print(_exported(exported, output))
    return 0


def _exported(exported: Exported, output: Path) -> str:
    tied = f", {len(exported.tied)} more tied to them" if exported.tied else ""
    return f"{output}: {len(exported.names)} tensors{tied}, {tables.size_text(exported.size_bytes)}"


def _candidate(entry: catalog.Found, monitor: str | None) -> Candidate:
    assert entry.checkpoint is not None
    manifest = entry.checkpoint.manifest
    step, score = manifest.record.get("step"), manifest.record.get(monitor) if monitor else None
    return Candidate(
        entry.name,
        manifest.created_s,
        step if isinstance(step, int) else -1,
        float(score) if isinstance(score, (int, float)) else None,
    )


def _folder(url: str, arguments: argparse.Namespace) -> Folder:
    return open_folder(url, storage_options=storage_options(arguments))


def _print(*shown: Table) -> None:
    # A file or a pipe has no width to keep to, and a table cut at 80 columns is no use.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    for table in shown:
        console.print(table)


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "prune": _prune,
    "keepers": _keepers,
    "export": _export,
}

CHECKPOINT = Command(
    "List, show, verify, compare, prune and export checkpoints; end what keeps them in memory.", _add_arguments, _run
)
