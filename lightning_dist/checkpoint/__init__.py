"""What outlives a process: sharded checkpoints, whole or invisible, and exports.

Pure: ``pieces`` (blocks of tensors, who writes which), ``coverage``, ``crc``, ``manifest`` with ``fields``,
``retention``, ``shard_stream``. Storage: ``storage`` (the seam), ``local_disk``. Under torch's planners:
``save_planner`` and ``shard_writer``, ``load_planner`` and ``shard_reader``, ``host_pieces``, ``objects``; ``sharded``
calls them. In memory: ``buddies`` and ``rate``, both pure; ``keeper``, a process that outlives the ranks; ``mirror``,
storage and memory written as one. Afterwards: ``catalog`` (what there is, and is it whole), ``leases``, ``compare``,
``tables``, ``whole`` and ``export``.
"""
