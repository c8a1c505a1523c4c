"""Tests of lightning_dist; a package so that ranks can import test functions by name."""
