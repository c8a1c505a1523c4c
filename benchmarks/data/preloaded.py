"""Imported by the process that ranks are forked from, so that no arm pays for importing what it reads by."""

import s3fs  # noqa: F401 - ours reads by it; the peers bring clients of their own

from benchmarks.data.peers import import_all

import_all()
