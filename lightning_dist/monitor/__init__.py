"""What happened in a run: steps cut into phases, samples of metrics, the verdict, the report.

``record`` holds the values that all of it agrees on, ``verdict`` what a diagnosis says. What is measured goes to files,
one a rank, without any collective; readers merge them. Nothing here knows Lightning: ``lightning_dist.capture`` makes a
Trainer's steps into events, and the callbacks hand both to each other.
"""
