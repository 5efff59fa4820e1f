"""The errors of weft. Each message states what was given, which rule failed and what to change."""


class WeftError(Exception):
    """Base class of every error that weft raises on purpose. The command line prints it as one line."""


class ConfigError(WeftError):
    """A run file, plan file or override breaks a rule. The exit status is 2."""


class PlanError(ConfigError):
    """A plan does not fit the model, the batch or the machine."""


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
    """A parallel run differs from the sequential model. The exit status is 1."""


class NumbersError(WeftError):
    """A loss or gradient is NaN, infinite or far too large, and the run is set to stop. The message names the step."""


class CorruptionError(WeftError):
    """State or results of a rank are not bitwise what they must be. The message names it; a restart may help."""


class LostRankError(WeftError):
    """A message from another rank did not arrive. The text names the rank, the stage and the message."""


class LocalError(WeftError):
    """A process that weft started on this machine failed, died or hung. The message names it."""


def error_class(name: str) -> type[WeftError] | None:
    """Returns the error class of this file with that name, to raise an error of another process again; None if none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, WeftError) else None
