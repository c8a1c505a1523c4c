"""Student's t distribution. Pure.

Student, "The probable error of a mean", Biometrika 1908. The distribution function is a regularised incomplete beta
function, by its continued fraction (NIST Digital Library of Mathematical Functions, 8.17.22), evaluated by Lentz's
method as modified by Thompson and Barnett, "Coulomb and Bessel functions of complex arguments and order", 1986.
"""

from __future__ import annotations

import functools
import math

_TINY = 1e-300
_ENOUGH = 1e-15
_TERMS_AT_MOST = 10_000


def t_cdf(value: float, freedom: float) -> float:
    """Chance of a value no larger than this one.

    Args:
        value: Of t.
        freedom: Degrees of freedom, above 0.
    """
    if math.isinf(value):
        return 0.0 if value < 0 else 1.0
    tail = 0.5 * _incomplete_beta(freedom / (freedom + value * value), freedom / 2, 0.5)
    return tail if value < 0 else 1 - tail


@functools.lru_cache(maxsize=4096)
def t_quantile(chance: float, freedom: float) -> float:
    """The value that is not exceeded with this chance, by bisection.

    Args:
        chance: Between 0 and 1, neither included.
        freedom: Degrees of freedom, above 0.
    """
    if chance < 0.5:
        return -t_quantile(1 - chance, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < chance:
        low, high = high, high * 2
    while high - low > 1e-12 * max(high, 1.0):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, freedom) < chance else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for 0 <= x <= 1."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - _incomplete_beta(1 - x, b, a)
    factor = a * math.log(x) + b * math.log1p(-x) - (math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))
    return math.exp(factor) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1 / _away_from_0(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _TERMS_AT_MOST):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_0(1 + term * d)
            c = _away_from_0(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _ENOUGH:
            break
    return value


def _away_from_0(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
