"""Every exception that Colibri raises on purpose, and the status codes of the C library that become them.

    ColibriError
    ├── ArgumentError (ValueError)      a parameter is out of its range or has no effect
    ├── ModelFileError                  a .colibri file is damaged, truncated or does not fit together
    ├── ModelIOError (OSError)          the operating system refused a file or a thread
    ├── UnsupportedError                the file or the machine needs something this build lacks
    ├── MemoryPlanError (MemoryError)   the planned bytes could not be had
    ├── ContextFullError                more tokens than the context has positions
    ├── CancelledError                  cancelled from another thread
    ├── QueueFullError                  an AsyncEngine has as many requests waiting as it may
    ├── NumericError                    a logit is NaN or infinite
    ├── ConversionError                 a checkpoint cannot be converted
    ├── ChatTemplateError               a chat template is missing, broken or refused the messages
    └── TraceError                      a routing trace is damaged, or the file is none

Owns: the tree. Refuses: anything else. A message says what was expected, what was found, where, and the next
step."""

from __future__ import annotations


class ColibriError(Exception):
    """Base of all."""


class ArgumentError(ColibriError, ValueError):
    """A parameter is out of its range, of the wrong type, or has no effect."""


class ModelFileError(ColibriError):
    """A `.colibri` file is damaged, truncated, or its parts contradict each other."""


class ModelIOError(ColibriError, OSError):
    """The operating system refused a file or a thread."""


class UnsupportedError(ColibriError):
    """The file or the machine needs something that this build lacks."""


class MemoryPlanError(ColibriError, MemoryError):
    """The planned bytes could not be had."""


class ContextFullError(ColibriError):
    """A sequence would grow beyond `context` positions."""


class CancelledError(ColibriError):
    """The evaluation was cancelled."""


class QueueFullError(ColibriError):
    """As many requests are waiting as may: try again later."""


class NumericError(ColibriError):
    """A logit is NaN or infinite: damaged weights, or an overflow."""


class ConversionError(ColibriError):
    """A checkpoint cannot be converted."""


class ChatTemplateError(ColibriError):
    """The chat template is missing, broken, or refused the messages."""


class TraceError(ColibriError):
    """A routing trace is damaged, or the file is none."""


# enum colibri_status of include/colibri.h; tests/test_native.py compares the two.
FROM_STATUS: dict[int, type[ColibriError]] = {
    -1: ArgumentError,
    -2: ModelIOError,
    -3: ModelFileError,
    -4: UnsupportedError,
    -5: MemoryPlanError,
    -6: ContextFullError,
    -7: CancelledError,
    -8: NumericError,
}


def from_status(status: int, text: str) -> ColibriError:
    """The exception for a negative status of the C library."""
    return FROM_STATUS.get(status, ColibriError)(
        text or f"the engine failed with status {status} and gave no text"
    )
