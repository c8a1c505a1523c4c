"""Moving tensors between ranks."""
