"""The one exception for what a user did wrong."""


class UserError(ValueError):
    """A mistake of the user's: its message is one line that names the file, row or flag and what would be right.

    Entry points print it without a traceback and exit with status 2.
    """
