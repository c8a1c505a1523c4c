"""What every speed claim of the project rests on: paired runs against what a user would use instead."""
