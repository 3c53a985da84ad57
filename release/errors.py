"""What stops a release."""


class ReleaseError(Exception):
    """The release cannot be made; the message says what to do about it."""
