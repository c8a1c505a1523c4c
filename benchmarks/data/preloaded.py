"""Imported by the process that ranks are forked from, so that no arm pays for importing its library."""

from benchmarks.data.peers import import_all

import_all()
