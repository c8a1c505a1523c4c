"""What is done when somebody fails, leaves or comes back: pure, with the clock handed in."""
