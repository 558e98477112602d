# SPDX-License-Identifier: Apache-2.0
"""One exception for each kind of failure. Each is also the built-in that its callers would catch."""
from __future__ import annotations

from . import _abi


class MegaMoEError(RuntimeError):
    """A call failed. The text is the library's; `status` its code, `status_name` that one's name."""

    status = 0

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        if status is not None:
            self.status = status

    @property
    def status_name(self) -> str:
        """The name of `status` in the C headers: "MEGAMOE_EINVAL", ..."""
        return _abi.lib.megamoe_status_name(self.status).decode()


class InvalidArgumentError(MegaMoEError, ValueError):
    """An argument, a shape or a dtype is wrong."""

    status = _abi.EINVAL


class FormatError(MegaMoEError, ValueError):
    """A file is malformed, or contradicts itself."""

    status = _abi.EFORMAT


class NotFoundError(MegaMoEError, LookupError):
    """A file, a layer or a tensor is not there."""

    status = _abi.ENOTFOUND


class UnsupportedError(MegaMoEError, NotImplementedError):
    """Understood, but neither this build, device nor model can do it."""

    status = _abi.EUNSUPPORTED


class InexactError(MegaMoEError, ArithmeticError):
    """A weight cannot be represented exactly on the device."""

    status = _abi.EINEXACT


class CapacityError(MegaMoEError):
    """More tokens, or more routes, than the workspace was created for."""

    status = _abi.ECAPACITY


class ExpertIdError(MegaMoEError, IndexError):
    """An expert id, a token id or an input scale is out of range."""

    status = _abi.EID


class StateError(MegaMoEError):
    """Calls out of order, or on something that was closed."""

    status = _abi.ESTATE


class DeadlineError(MegaMoEError, TimeoutError):
    """Another rank did not arrive in time."""

    status = _abi.ETIMEDOUT


class PeerError(MegaMoEError):
    """Another rank failed or gave up."""

    status = _abi.EPEER


class DeviceError(MegaMoEError):
    """The device failed."""

    status = _abi.EDEVICE


class CheckError(MegaMoEError):
    """A hash does not hold."""

    status = _abi.ECHECK


class OutOfMemoryError(MegaMoEError, MemoryError):
    """Memory of the host or of the device is used up."""

    status = _abi.ENOMEM


class FileError(MegaMoEError, OSError):
    """A file could not be read or written."""

    status = _abi.EIO


_CLASSES = {kind.status: kind for kind in MegaMoEError.__subclasses__()}


def error(status: int, message: str) -> MegaMoEError:
    """The exception for a status of the library."""
    return _CLASSES.get(status, MegaMoEError)(message, status)


def check(status: int) -> None:
    """Raises what the call that returned `status` has left as its message on this thread."""
    if status != _abi.OK:
        message = _abi.lib.megamoe_last_error() or _abi.lib.megamoe_status_text(status)
        raise error(status, message.decode(errors="replace"))
