"""``hierdist checkpoint export``: the weights of a checkpoint as a safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from lightning_dist.checkpoint.export import export_safetensors
from lightning_dist.cli.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    export = actions.add_parser("export", help="Write the weights of a .ckpt file as safetensors.")
    export.add_argument("checkpoint", type=Path, help="a file that Trainer.save_checkpoint or a callback has written")
    export.add_argument("output", type=Path, help="the file to write, e.g. model.safetensors")
    export.add_argument("--prefix", default="", help="keep only names that begin so, without it, e.g. model.")


def _run(arguments: argparse.Namespace) -> int:
    exported = export_safetensors(arguments.checkpoint, arguments.output, prefix=arguments.prefix)
    tied = f", {len(exported.tied)} more tied to them" if exported.tied else ""
    Console().print(f"{arguments.output}: {len(exported.names)} tensors{tied}, {exported.size_bytes / 1e6:,.1f} MB")
    return 0


CHECKPOINT = Command("Export checkpoints.", _add_arguments, _run)
