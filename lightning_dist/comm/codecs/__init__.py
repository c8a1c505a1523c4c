"""What crosses the slow leg: how values are encoded for the network; one scheme a file, functions of values."""

from lightning_dist.comm.codecs.choice import CODECS, chunk_bytes_of, codec_of, gathers_of
from lightning_dist.comm.codecs.codec import Codec

__all__ = ["CODECS", "Codec", "chunk_bytes_of", "codec_of", "gathers_of"]
