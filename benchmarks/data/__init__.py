"""How fast training data are streamed, and how often shared storage is read, beside what a user would use instead."""
