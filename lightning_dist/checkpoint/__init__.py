"""What outlives a process: sharded checkpoints, whole or invisible, and exports.

Pure: ``pieces`` (blocks of tensors, who writes which), ``coverage``, ``crc``, ``manifest`` with ``fields``,
``save_ids``, ``retention``, ``shard_stream``, ``requests`` and ``host_reads`` (who reads what for whom). Storage:
``storage`` (the seam), ``local_disk``. The copy that training waits for: ``host_copies``; and that it does not:
``late_copy``, ``before_steps``, ``background``. Under torch's planners: ``save_planner`` and ``shard_writer``,
``load_planner``, ``shard_reader`` with ``stored``, and ``host_reading``; ``host_pieces``, ``objects``; ``sharded``
calls them. In memory: ``buddies`` and ``rate``, both pure; ``keeper``, a process that outlives the ranks; ``mirror``,
storage and memory written as one. Afterwards: ``catalog`` (what there is, and is it whole), ``leases``, ``compare``,
``tables``, ``whole``, ``blocks``, ``export`` and ``archive``.
"""
