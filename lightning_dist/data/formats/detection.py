"""Which format a folder is in: by its index if it has one, else by the names of its files."""

from __future__ import annotations

from lightning_dist.data.formats import arrow, jsonl, parquet, tar, tokens
from lightning_dist.data.formats.litdata import is_litdata
from lightning_dist.data.formats.mds import is_mds
from lightning_dist.data.index.index_file import INDEX_NAME, is_index, read_json
from lightning_dist.data.reading import ReadFolder
from lightning_dist.errors import ForeignDataError

ENDINGS: dict[str, tuple[str, ...]] = {
    "tokens": tokens.ENDINGS,
    "jsonl": jsonl.ENDINGS,
    "tar": tar.ENDINGS,
    "parquet": parquet.ENDINGS,
    "arrow": arrow.ENDINGS,
}


def detect_format(folder: ReadFolder) -> str:
    """Key of :data:`~lightning_dist.data.formats.FORMATS`.

    Raises:
        ForeignDataError: Files are of several formats, or of none.
    """
    found = read_json(folder, INDEX_NAME)
    if is_index(found):
        return str(found.get("format"))
    if is_mds(found):
        return "mds"
    if is_litdata(found):
        return "litdata"
    names = [name.lower() for name in folder.sizes()]
    if not names:
        raise ForeignDataError(f"{folder.url} has no files")
    fitting = [format_name for format_name, endings in ENDINGS.items() if any(n.endswith(endings) for n in names)]
    if not fitting:
        raise ForeignDataError(
            f"{folder.url} has files of no format that is read ({', '.join(ENDINGS)}); of texts, hierdist data write "
            "makes token shards"
        )
    if len(fitting) > 1:
        raise ForeignDataError(
            f"{folder.url} has files of several formats ({', '.join(fitting)}): say which, by --format or "
            "Source(..., format=...), or give a folder that holds one format only"
        )
    return fitting[0]
