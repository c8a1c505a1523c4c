"""Permutations by key: of a short list, and of places that are never listed. Pure.

Everything is arithmetic on 64-bit numbers, and not numpy's ``Generator``, whose results may change between versions: an
order that is saved in a checkpoint has to be the same on any machine and at any time.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from lightning_dist.data.index.dataset_index import Numbers

Words = NDArray[np.uint64]

ROUNDS = 8
"""Of :func:`permuted`; even. Places of small sets, six and fewer, are visibly uneven with less."""

# Of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_ROUND_KEYS = np.array([[_GOLDEN * number % (1 << 64)] for number in range(1, ROUNDS + 1)], dtype=np.uint64)


def key(*parts: int) -> int:
    """A 64-bit key, another one for each list of whole numbers of any size."""
    digest = hashlib.blake2b(" ".join(str(part) for part in parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def keys(base: int, numbers: Numbers) -> Words:
    """A key for each number: the outputs of SplitMix64 at these places of its sequence."""
    word = numbers.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(base)
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


def permutation(size: int, base: int) -> Numbers:
    """The numbers from 0 to ``size`` - 1 in an order that depends on the key only."""
    return np.argsort(keys(base, np.arange(size, dtype=np.int64)), kind="stable").astype(np.int64)


def permuted(places: Numbers, sizes: Numbers, words: Words) -> Numbers:
    """Where each place goes under the permutation of its key; nothing is listed, and each is found on its own.

    A Feistel network on pairs (n div a, n mod a) with a the root of the size; what falls outside of the size goes on
    through the network until it is inside: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002
    (methods 2 and 3).

    Args:
        places: From 0 to the size - 1.
        sizes: How many places are permuted among each other, for each of them; at least 1.
        words: The key, for each of them.
    """
    size = sizes.astype(np.uint64)
    width = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    height = (size + width - np.uint64(1)) // width
    found = _through(places.astype(np.uint64), width, height, words)
    outside = np.flatnonzero(found >= size)
    while len(outside):
        found[outside] = _through(found[outside], width[outside], height[outside], words[outside])
        outside = outside[found[outside] >= size[outside]]
    return found.astype(np.int64)


def _through(places: Words, width: Words, height: Words, words: Words) -> Words:
    high = places // width
    low = places - high * width
    for round_words in words + _ROUND_KEYS:
        shift = high + round_words
        shift *= _FIRST
        shift ^= shift >> _HALF
        shift *= _SECOND
        shift >>= _HALF
        shift *= width  # below 2^32 each: a size has less than 64 bits
        shift >>= _HALF  # now below the width
        low += shift
        # Mod the width: what would be negative is a large number here.
        np.minimum(low, low - width, out=low)
        high, low, width, height = low, high, height, width
    return high * width + low
