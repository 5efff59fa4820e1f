"""The errors a user may meet: each says what was given, which rule failed and what to change."""


class WeftError(Exception):
    """Base of every error that weft raises on purpose; the CLI prints it in one line."""


class ConfigError(WeftError):
    """A run file, plan file or override that breaks a rule. Exit status 2."""


class PlanError(ConfigError):
    """A plan that does not fit the model, the batch or the machine."""


class DataError(ConfigError):
    """Training data that is missing, empty, too short or unreadable."""


class LaunchError(ConfigError):
    """Processes that were started in a way that does not match the plan."""


class CheckpointError(WeftError):
    """A checkpoint that is incomplete, corrupt or of another model. Names the file."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was saved. Another one may do."""


class FormatError(CheckpointError):
    """A checkpoint whose format this version of weft does not know. It is not damaged."""


class VerifyError(WeftError):
    """A parallel run that differs from the sequential model. Exit status 1."""


class NumbersError(WeftError):
    """A loss or gradient that is no number, or far too large, where the run is to stop. Names the step."""


class CorruptionError(WeftError):
    """State or results of a rank that are not what they must be, bit for bit. Names the rank; a restart may heal it."""


class LostRankError(WeftError):
    """A message from another rank that did not come. Names the rank, the stage and the message."""


class LocalError(WeftError):
    """A process that weft started here failed, died or hung; the message names it."""


def error_class(name: str) -> type[WeftError] | None:
    """The error of this file with that name, to raise again what another process raised."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, WeftError) else None
