"""What less over the slow link gives and costs; see :mod:`benchmarks.compression.command`."""
