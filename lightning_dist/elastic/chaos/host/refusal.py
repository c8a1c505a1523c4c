"""Why a fault cannot be done here."""


class Refused(Exception):
    """The message says why; nothing has been changed."""
