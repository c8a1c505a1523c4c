"""How often the verdict names the cause that was put into a run; see :mod:`benchmarks.verdict.__main__`."""
