"""What a data set consists of: ``dataset_index`` (shards, chunks, samples; pure) and ``index_file``.

How an index is made, and held against the files: ``survey``, ``verification``.
"""
