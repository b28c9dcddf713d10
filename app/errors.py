"""The one exception for what a user did wrong."""


class UserError(ValueError):
    """A mistake of the user's: its message is one line that names the file, row or flag and what would be right.

    Entry points print it without a traceback and exit with status 2.
    """


class RunError(RuntimeError):
    """A failure of the run that every rank knows of: its message is one line that names step and cause. Exit status
    1."""


class Preempted(Exception):
    """The run was asked to stop, has saved a checkpoint on every rank's behalf and can be resumed. Exit status 75."""


class AlreadyFinished(Exception):
    """A restarted job finds that its run is complete: nothing is left to do. Exit status 0."""
