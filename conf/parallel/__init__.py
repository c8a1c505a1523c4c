"""Hydra group ``parallel``."""
