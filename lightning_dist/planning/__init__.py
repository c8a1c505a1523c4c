"""What would happen: cost models of plain values. Pure: no torch, no clock, no file."""
