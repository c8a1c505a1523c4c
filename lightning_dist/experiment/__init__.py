"""Two ways to train, compared fairly: what is run, what is read of each run, what it says, and how that is shown.

Pure but for :mod:`.store`, which keeps runs in a folder, and :mod:`.running`, which starts them.
"""
