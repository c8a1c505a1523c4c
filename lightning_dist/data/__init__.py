"""What is read: streamed data, in an order that no number of ranks changes, from storage once a host.

Pure, and in the order in which they build on each other: ``index`` (shards, chunks, samples), ``shuffling``,
``order`` and ``mixture`` (which sample stands where), ``dealing`` (who takes it), ``steps``, ``shares`` (one
replica's part of them), ``position`` and ``identity`` (what is saved), ``ahead``, ``replicas``, ``windows``,
``packing``.

From storage to a chunk: ``reading`` (the contracts), ``shards`` (the seam), ``local_chunks``; ``cache`` with
``host_chunks``, ``fetching``, and of the files on disk ``cached_files``, ``seals``, ``room``, ``failures``,
``host_lock`` and ``private_folder``. From a chunk to a sample: ``formats``, ``compression``, ``placed_bytes``. From
samples to batches: ``source``, ``roles``, ``batches``, ``nodes``, ``running``, ``loader``, ``open_loaders``;
``agreed`` for loaders of others.

Indexes and writing: ``index_file``, ``detection``, ``survey``, ``verification``, ``texts``, ``encoders``,
``token_writer``, ``output``.
"""
