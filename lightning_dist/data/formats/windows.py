"""Windows of tokens: how a shard is cut into chunks, and chunks into samples. Arithmetic only.

A shard of n tokens has (n - 1) // seq_len windows of seq_len + 1 tokens; the last token of one is the first of the
next, so each token but the first is predicted once. What is left at a shard's end, fewer than seq_len tokens, is in no
window.
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """Windows that are fetched at once.

    Attributes:
        first: Token they start at, in the shard.
        tokens: They cover; the last is also the first of the next cut.
        windows: Their number.
    """

    first: int
    tokens: int
    windows: int


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Windows of so many tokens in a row."""
    return max(0, (num_tokens - 1) // seq_len)


def cut_windows(num_tokens: int, *, seq_len: int, chunk_tokens: int) -> list[Cut]:
    """Cut a shard into chunks of equally many windows; the last may have fewer.

    Args:
        num_tokens: In the shard.
        seq_len: Tokens a window predicts.
        chunk_tokens: A chunk covers at most so many, but at least one window.
    """
    windows, at_once = num_windows(num_tokens, seq_len), max(1, (chunk_tokens - 1) // seq_len)
    return [
        Cut(start * seq_len, min(at_once, windows - start) * seq_len + 1, min(at_once, windows - start))
        for start in range(0, windows, at_once)
    ]
