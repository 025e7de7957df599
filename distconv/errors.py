"""The errors distconv raises.

Each derives from :class:`DistconvError` and from the built-in exception that a caller would expect, so that both
``except dc.GridError`` and ``except ValueError`` work. Unless a class says otherwise an error is raised on *all* ranks
with the same text, before any data is sent, and the communicator stays usable.
"""

BAD_INPUT = 2
"""The exit code of a command that was given something that is wrong."""

DISAGREEMENT = 70
"""The exit code of a job whose ranks disagree, where nobody catches the MismatchError (EX_SOFTWARE)."""


class DistconvError(Exception):
    """Base of everything that distconv raises on purpose."""


class GridError(DistconvError, ValueError):
    """The extents of a process grid do not fit its communicator."""


class DistributionError(DistconvError, ValueError):
    """A distribution that cannot be: unknown axis, boundaries that do not cover the extent, block out of range."""


class ShapeError(DistconvError, ValueError, RuntimeError):
    """Shapes that an operator cannot take; the text is torch's own where torch has one."""


class DtypeError(ShapeError):
    """Dtypes that an operator cannot take together; the text is torch's own where torch has one.

    A ShapeError, which it was before it had a name of its own. No TypeError: Python would take that from ``x @ y`` for
    an operator that ``x`` does not have.
    """


class NumericalError(DistconvError, ValueError, RuntimeError, IndexError):
    """Values that an operator cannot take, on whatever rank they are; the text is torch's own."""


class CoordinateError(DistconvError, ValueError):
    """Coordinates of a sparse tensor that cannot be: not integers, repeated, of no sample, or too far apart."""


class LabelError(DistconvError, IndexError):
    """A label that is no class index of the logits."""


class EnvironmentVariableError(DistconvError, ValueError):
    """A ``DISTCONV_*`` variable whose value is none that it takes."""


class LaunchError(DistconvError, RuntimeError):
    """The launcher started several processes and MPI has one rank in each, or they do not understand each other."""


class MismatchError(DistconvError, ValueError):
    """Ranks disagree about something they must agree on; the text lists what each of them has."""

    names_calls: bool = False
    """True if the message names the call and the layer of each rank. Otherwise the layer of this rank is added."""


class UnsupportedOperation(DistconvError, NotImplementedError):
    """A function, or an option of it, without a distributed rule; the text names the way out."""


class NoRule(UnsupportedOperation):
    """One of those that the whole tensors can serve: dispatch catches it and asks the exact fallback."""


class ReplicationWarning(UserWarning):
    """Every rank computes the whole: a call has no distributed rule, or a parallelized model got plain tensors."""


class CommunicatorError(DistconvError, RuntimeError):
    """The communicator is null, freed, or MPI has been finalized. Raised on the rank that finds out."""


class CaptureError(DistconvError, RuntimeError):
    """A step cannot be recorded, is not what was recorded any more, or its replay gave other numbers; where and why."""


class DataError(DistconvError, OSError):
    """A data file is missing, unreadable, damaged, changed meanwhile, or not of the expected layout."""


class CheckpointError(DistconvError, RuntimeError):
    """A checkpoint cannot be written, or what is there is incomplete, damaged, or of another model."""


class PlanError(DistconvError, ValueError):
    """A plan that does not fit: wrong file, unknown layer, impossible grid."""


class MachineError(DistconvError, ValueError):
    """A machine description that cannot be: unknown name, unreadable file, wrong unit, missing key."""


class ScanError(DistconvError, ValueError):
    """Jacobians that make no chain: shapes, dtypes, devices or numbers of samples that do not fit each other."""


class PipelineError(DistconvError, RuntimeError):
    """A pass of a pipeline failed, or its ranks or stages do not fit each other.

    Raised on the rank that finds out, naming it; the others wait for what it was to send, so the job has to end.
    """
