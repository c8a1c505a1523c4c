"""What the tests and benchmarks stand on: ready ranks, a cluster on one machine, leak checks, a reference run."""
