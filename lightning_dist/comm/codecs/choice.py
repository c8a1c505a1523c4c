"""Which codec a config asks for."""

from __future__ import annotations

from collections.abc import Callable

from lightning_dist.comm.codecs.cast import CastCodec
from lightning_dist.comm.codecs.chunks import encoded_chunk_bytes
from lightning_dist.comm.codecs.codec import Codec
from lightning_dist.comm.codecs.int8 import Int8Codec
from lightning_dist.comm.codecs.onebit import OnebitCodec
from lightning_dist.comm.codecs.topk import TopkCodec
from lightning_dist.config import SyncConfig
from lightning_dist.errors import unknown_option

CODECS: dict[str, Callable[[SyncConfig], Codec | None]] = {
    "same": lambda sync: None,
    "bf16": lambda sync: CastCodec(),
    "int8": lambda sync: Int8Codec(sync.rounding),
    "onebit": lambda sync: OnebitCodec(),
    "topk": lambda sync: TopkCodec(sync.ratio),
}


def codec_of(sync: SyncConfig) -> Codec | None:
    """What crosses between hosts is encoded by this; ``None`` sends values as they are."""
    if sync.codec not in CODECS:
        raise unknown_option("sync.codec", sync.codec, CODECS)
    return CODECS[sync.codec](sync)


def gathers_of(sync: SyncConfig) -> Codec | None:
    """What parameters are encoded by where they leave a host; to nearest, since nothing is kept of their errors."""
    return Int8Codec() if sync.gathers == "int8" else None


def chunk_bytes_of(sync: SyncConfig, *, messages: int) -> int:
    """How large the chunks are in which gradients travel, in bytes of fp32; see :func:`encoded_chunk_bytes`.

    Args:
        sync: Options.
        messages: Pieces of a chunk that are sent by themselves.
    """
    return encoded_chunk_bytes(codec_of(sync), sync.chunk_bytes, at_most=sync.bucket_bytes, messages=messages)
