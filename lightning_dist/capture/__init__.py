"""What a Trainer does, as events: its phases, its communication, its batches; under any strategy."""

from lightning_dist.capture.rendezvous import default_store
from lightning_dist.capture.saying import say
from lightning_dist.capture.trainer_capture import TrainerCapture, capture_of

__all__ = ["TrainerCapture", "capture_of", "default_store", "say"]
