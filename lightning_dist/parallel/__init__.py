"""What becomes of a model."""
