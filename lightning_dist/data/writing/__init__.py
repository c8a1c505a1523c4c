"""Token shards from text: ``texts``, ``encoders``, ``token_writer``."""
