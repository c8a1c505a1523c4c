"""What becomes of a gradient: one scheme a file."""
