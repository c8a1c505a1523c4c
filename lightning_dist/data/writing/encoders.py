"""From text to tokens: bytes as they are, or a file of the package ``tokenizers``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dist.data.packages import needed
from lightning_dist.errors import ConfigError

BYTES = "bytes"
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Encoder(Protocol):
    """Makes tokens of text. Threads may call it at once.

    Attributes:
        name: For the index; the same for the same tokens.
        vocab_size: Tokens are from 0 to one less.
        eos: The token that ends documents; ``None`` without one.
    """

    name: str
    vocab_size: int
    eos: int | None

    def encode(self, text: bytes, what: str) -> NDArray[Any]:
        """Tokens of a block of text, without ``eos``.

        Args:
            text: The block.
            what: Whose text it is, for messages.

        Raises:
            ConfigError: It cannot be encoded.
        """


class ByteEncoder:
    """A token for each byte. Documents end with the byte 0, which text does not have.

    Args:
        with_eos: Whether documents end so.
    """

    def __init__(self, *, with_eos: bool) -> None:
        self.name = BYTES
        self.vocab_size = 256
        self.eos = 0 if with_eos else None

    def encode(self, text: bytes, what: str) -> NDArray[Any]:
        """See :class:`Encoder`."""
        if self.eos is not None and b"\x00" in text:
            raise ConfigError(
                f"{what} has the byte 0 in it, which ends documents here: it is no text; leave it out, or write "
                "without --eos"
            )
        return np.frombuffer(text, dtype=np.uint8)


class FileEncoder:
    """A ``tokenizer.json``.

    Args:
        path: Of the file.
        eos: Name of the token that ends documents; ``True``: the usual one; ``None``: none.
    """

    def __init__(self, path: Path, *, eos: str | bool | None) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"--tokenizer {path} cannot be read ({error}): give {BYTES!r}, or the path of a tokenizer.json"
            ) from error
        tokenizers = needed("tokenizers", package="tokenizers", what="a tokenizer file")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises bare exceptions
            raise ConfigError(f"{path} is no file of the package tokenizers: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = f"{path.name}:{hashlib.sha256(content).hexdigest()[:16]}"
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.eos = None if eos in (None, False) else vocabulary[_end_token(eos, vocabulary, path)]

    def encode(self, text: bytes, what: str) -> NDArray[Any]:
        """See :class:`Encoder`."""
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{what} is not UTF-8 text: {error}; convert it, or use --tokenizer {BYTES}") from error
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, dtype=np.uint32)


def open_encoder(tokenizer: str, *, eos: str | bool | None) -> Encoder:
    """The encoder of a name.

    Args:
        tokenizer: ``bytes``, or the path of a ``tokenizer.json``.
        eos: Whether documents end with a token of their own; its name, or ``True`` for the usual one.

    Raises:
        ConfigError: There is no such file or token.
    """
    if tokenizer != BYTES:
        return FileEncoder(Path(tokenizer).expanduser(), eos=eos)
    if isinstance(eos, str):
        raise ConfigError(f"--eos {eos}: bytes have no tokens with names; write --eos alone, which is the byte 0")
    return ByteEncoder(with_eos=bool(eos))


def dtype_for(vocab_size: int) -> str:
    """The smallest type that holds every token."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def _end_token(eos: str | bool | None, vocabulary: dict[str, int], path: Path) -> str:
    if isinstance(eos, str):
        if eos not in vocabulary:
            raise ConfigError(f"--eos {eos}: {path} has no such token; it has {_special(vocabulary)}")
        return eos
    found = [token for token in _USUAL_ENDS if token in vocabulary]
    if len(found) != 1:
        raise ConfigError(
            f"{path} has {'several' if found else 'none'} of the usual tokens that end documents "
            f"({', '.join(found or _USUAL_ENDS)}): name it, --eos TOKEN; it has {_special(vocabulary)}"
        )
    return found[0]


def _special(vocabulary: dict[str, int]) -> str:
    found = [token for token in sorted(vocabulary) if len(token) > 2 and token[0] in "<[" and token[-1] in ">]"]
    return ", ".join(found[:20]) or "no token in <> or []"
