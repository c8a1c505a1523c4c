"""What a Trainer does, as events: its phases, its communication, its batches; under any strategy."""
