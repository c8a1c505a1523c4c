"""Tables whose rows are dealt to servers: looked up by the rows' numbers, and trained where they are."""

from lightning_dist.gradsync.parameter_server.embeddings import tables_to_serve
from lightning_dist.gradsync.parameter_server.served import ServedTables

__all__ = ["ServedTables", "tables_to_serve"]
