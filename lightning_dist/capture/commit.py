"""The commit of the user's repository, read from its files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_HASH = re.compile(r"[0-9a-f]{40,64}")


def commit_of_script() -> str | None:
    """Of the repository that holds the script, or else the working directory; ``None`` if none does."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        starts = [*([Path(script).absolute().parent] if script else []), Path.cwd()]
    except OSError:  # the working directory has been removed
        return None
    return next((found for start in starts if (found := commit_of(start)) is not None), None)


def commit_of(folder: Path) -> str | None:
    """Of the repository that a folder is in; ``None`` if there is none, or it has no commit."""
    try:
        for parent in (folder, *folder.parents):
            if (parent / ".git").exists():
                return _head(_git_folder(parent / ".git"))
    except (OSError, UnicodeDecodeError):
        return None
    return None


def _git_folder(path: Path) -> Path:
    """Where the repository is: beside the files, or, for a linked worktree, where a file says."""
    if path.is_dir():
        return path
    return path.parent / path.read_text(encoding="utf-8").removeprefix("gitdir:").strip()


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head if _HASH.fullmatch(head) else None
    name = head.removeprefix("ref:").strip()
    common = git / "commondir"
    shared = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
    for place in (git, shared):
        if (place / name).exists():
            commit = (place / name).read_text(encoding="utf-8").strip()
            return commit if _HASH.fullmatch(commit) else None
    packed = shared / "packed-refs"
    for line in packed.read_text(encoding="utf-8").splitlines() if packed.exists() else ():
        commit, _, ref = line.partition(" ")
        if ref == name:
            return commit
    return None
