"""How files hold samples: a format a file, and one table to choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from lightning_dist.data.formats.arrow import ArrowFormat
from lightning_dist.data.formats.jsonl import JsonlFormat
from lightning_dist.data.formats.litdata import LitDataFormat
from lightning_dist.data.formats.mapped import MappedFormat
from lightning_dist.data.formats.mds import MdsFormat
from lightning_dist.data.formats.packed import PackedFormat
from lightning_dist.data.formats.parquet import ParquetFormat
from lightning_dist.data.formats.tar import TarFormat
from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.index.survey import Progress
from lightning_dist.data.reading import Format, ReadFolder
from lightning_dist.errors import ConfigError, unknown_option

FORMATS: dict[str, Callable[..., Format]] = {
    "tokens": TokensFormat,
    "packed": PackedFormat,
    "jsonl": JsonlFormat,
    "tar": TarFormat,
    "parquet": ParquetFormat,
    "arrow": ArrowFormat,
    "mds": MdsFormat,
    "litdata": LitDataFormat,
    "mapped": MappedFormat,
}


@runtime_checkable
class Surveyed(Protocol):
    """A format whose files do not say how many samples they hold: an index is written for it once."""

    def survey(self, folder: ReadFolder, *, workers: int = 1, progress: Progress | None = None) -> DatasetIndex:
        """The index of a folder, by one pass over its shards.

        Args:
            folder: With data, and no index.
            workers: Shards at a time.
            progress: Told how many bytes more are done.

        Raises:
            ForeignDataError: The folder holds something else, or a package is missing.
            UnreadableShardError: A file cannot be read.
        """


def make_format(name: str, **options: Any) -> Format:
    """A format by name.

    Args:
        name: Key of :data:`FORMATS`.
        options: Of its class; those that are ``None`` are left to it.

    Raises:
        ConfigError: There is no such format, or it has no such option.
    """
    if name not in FORMATS:
        raise unknown_option("format", name, FORMATS)
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return FORMATS[name](**given)
    except TypeError as error:
        raise ConfigError(f"the format {name} cannot be made of {', '.join(given) or 'no options'}: {error}") from error
