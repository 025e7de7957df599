"""The exceptions and the warning that distconv raises.

Each class derives from :class:`DistconvError` and from the built-in exception that a caller would expect, so that both
``except dc.GridError`` and ``except ValueError`` work. Unless a class says otherwise, an error is raised on *all* ranks
with the same message, before any data is sent, and the communicator stays usable.
"""

BAD_INPUT = 2
"""Exit code of a command whose input is invalid."""

DISAGREEMENT = 70
"""Exit code of a job whose ranks disagree, if the MismatchError is not caught (EX_SOFTWARE)."""


class DistconvError(Exception):
    """Base class of all errors of distconv."""


class GridError(DistconvError, ValueError):
    """The shape of a process grid is invalid or does not fit its communicator."""


class DistributionError(DistconvError, ValueError):
    """A distribution is invalid: unknown axis, wrong boundaries, or a block index out of range."""


class ShapeError(DistconvError, ValueError, RuntimeError):
    """The shapes of operands do not fit; the message is torch's own if torch has one."""


class DtypeError(ShapeError):
    """The dtypes of operands do not fit; the message is torch's own if torch has one.

    The class derives from ShapeError for compatibility. It is not a TypeError: Python would interpret a TypeError in
    ``x @ y`` as a missing operator of ``x``.
    """


class NumericalError(DistconvError, ValueError, RuntimeError, IndexError):
    """Values of a tensor are invalid for an operator, on any rank; the message is torch's own."""


class CoordinateError(DistconvError, ValueError):
    """Coordinates of a sparse tensor are invalid: not integers, repeated, without a sample, or too far apart."""


class LabelError(DistconvError, IndexError):
    """A label is not a class index of the logits."""


class EnvironmentVariableError(DistconvError, ValueError):
    """A ``DISTCONV_*`` environment variable has an invalid value."""


class LaunchError(DistconvError, RuntimeError):
    """The launcher and the MPI library do not work together, such as when each process is a job of one rank."""


class MismatchError(DistconvError, ValueError):
    """Ranks disagree about a value or a call that must be identical; the message lists the value of each rank."""

    names_calls: bool = False
    """True if the message names the call and the layer of each rank. Otherwise the layer of this rank is added."""


class UnsupportedOperation(DistconvError, NotImplementedError):
    """A function or an option has no distributed rule; the message suggests an alternative."""


class NoRule(UnsupportedOperation):
    """An operator has no rule for a call: dispatch catches the error and computes the call replicated if possible."""


class ReplicationWarning(UserWarning):
    """Every rank computes the full result: a call has no rule, or a parallelized model got plain tensors."""


class CommunicatorError(DistconvError, RuntimeError):
    """The communicator is null or freed, or MPI was finalized. Raised only on the rank that detects it."""


class CaptureError(DistconvError, RuntimeError):
    """A step cannot be recorded, a guard failed, or a replay gave a different result."""


class DataError(DistconvError, OSError):
    """A data file is missing, unreadable, damaged, modified while it is read, or not in the expected format."""


class CheckpointError(DistconvError, RuntimeError):
    """A checkpoint cannot be written, is incomplete or damaged, or belongs to another model."""


class PlanError(DistconvError, ValueError):
    """A plan is invalid or does not fit the model: wrong file, unknown layer, impossible grid."""


class MachineError(DistconvError, ValueError):
    """A machine description is invalid: unknown name, unreadable file, wrong unit, missing key."""


class ScanError(DistconvError, ValueError):
    """Jacobians do not form a chain: their shapes, dtypes, devices or numbers of samples do not fit each other."""


class PipelineError(DistconvError, RuntimeError):
    """A pass of a pipeline failed, or its ranks or stages do not fit each other.

    Raised only on the rank that detects it, with the number of that rank. Other ranks wait for messages of this
    rank, so the job has to end.
    """
