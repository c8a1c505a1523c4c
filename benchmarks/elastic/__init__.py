"""How fast a run recovers, what it loses, and what it costs to be able to."""
