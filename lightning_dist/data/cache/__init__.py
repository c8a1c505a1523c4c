"""Chunks on this host: where they are (``local_chunks``), or through a cache that its processes share.

Of that: ``cached_chunks``; of one process ``host_chunks`` and ``fetching``; of the files on disk ``cached_files``,
``seals``, ``room``, ``failures``, ``host_lock`` and ``private_folder``.
"""
