"""The errors of weft. Each message states what was given, which rule failed and what to change.

The exit status of a command is 2 for an error that the user can mend (`ConfigError`, `CheckpointError`), else 1.
"""


class WeftError(Exception):
    """Base class of every error that weft raises on purpose. The command line prints it as one line."""


class ConfigError(WeftError):
    """A run file, plan file or override breaks a rule."""


class PlanError(ConfigError):
    """A plan does not fit the model, the batch or the machine."""


class UnfitError(PlanError):
    """A plan does not fit the model of a proof, so nothing was compared. It may fit a larger model."""


class DataError(ConfigError):
    """Training data are missing, empty, too short or unreadable."""


class LaunchError(ConfigError):
    """Processes were started in a way that does not match the plan."""


class CheckpointError(WeftError):
    """A checkpoint is incomplete, corrupt or of another model. The message names the file."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not what was saved. Another checkpoint may be intact."""


class FormatError(CheckpointError):
    """This version of weft does not know the format of a checkpoint. The checkpoint is not damaged."""


class VerifyError(WeftError):
    """A parallel run differs from the sequential model."""


class NumbersError(WeftError):
    """A loss or gradient is NaN, infinite or far too large, and the run is set to stop. The message names the step."""


class CorruptionError(WeftError):
    """State or results of a rank are not bitwise what they must be. The message names it; a restart may help."""


class LostRankError(WeftError):
    """A message from another rank did not arrive. The text names the rank, the stage and the message."""


class EngineError(WeftError):
    """The engine of a server failed while it served. The same weights may be served by ranks that start again."""


class LocalError(WeftError):
    """A process that weft started on this machine failed, died or hung. The message names it."""


BAD_INPUT, DEFECT = 2, 1  # exit statuses
UNFINISHED = 75  # the exit status of a run that was stopped and can go on (EX_TEMPFAIL, "try again later")


def exit_status(error: WeftError) -> int:
    """Returns the exit status of a command that an error ends."""
    return BAD_INPUT if isinstance(error, (ConfigError, CheckpointError)) else DEFECT


def error_class(name: str) -> type[WeftError] | None:
    """Returns the error class of this file with that name, to raise an error of another process again; None if none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, WeftError) else None
