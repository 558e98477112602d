# SPDX-License-Identifier: Apache-2.0
"""Communicators: the ranks over which the experts of a layer are spread."""
from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from typing import Any, Callable, Sequence

from . import _abi
from ._abi import lib
from ._errors import InvalidArgumentError, check
from ._objects import Handle


def _bytes_at(base: int | None, offset: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address((base or 0) + offset)).cast("B")


class Comm(Handle):
    """The ranks over which the experts of a layer are spread; `Comm()` is one rank alone."""

    def __init__(self, _pointer: int | None = None):
        if _pointer is None:
            pointer = c_void_p()
            check(lib.megamoe_comm_self(byref(pointer)))
            _pointer = pointer.value
        super().__init__(_pointer, lib.megamoe_comm_close)
        self._keep: Any = None
        self.rank: int = lib.megamoe_comm_rank(_pointer)
        self.size: int = lib.megamoe_comm_size(_pointer)

    @staticmethod
    def _several(create: Any, size: int) -> list["Comm"]:
        pointers = (c_void_p * max(size, 1))()
        check(create(size, pointers))
        return [Comm(pointer) for pointer in pointers]

    @classmethod
    def threads(cls, size: int) -> list["Comm"]:
        """`size` ranks, each driven by a thread of its own. Collective calls wait for all of them."""
        return cls._several(lib.megamoe_comm_threads, size)

    @classmethod
    def folded(cls, size: int) -> list["Comm"]:
        """`size` ranks, all driven by one thread through `forward_group`."""
        return cls._several(lib.megamoe_comm_folded, size)

    @classmethod
    def from_env(cls, *, deadline_ms: int = 0) -> "Comm":
        """This process's rank as its launcher (torchrun, Slurm, MPI, `megamoe launch`) has set it in
        the environment. Waits for all ranks. NotFoundError where there is no launcher."""
        options = _abi.CommOptions(creation_deadline_ms=deadline_ms)
        pointer = c_void_p()
        check(lib.megamoe_comm_from_env(byref(options), byref(pointer)))
        return cls(pointer.value)

    @classmethod
    def from_tcp(cls, rank: int, size: int, *, port: int, address: str = "127.0.0.1",
                 job: str | None = None, deadline_ms: int = 0) -> "Comm":
        """This process's rank; all find each other at a port of rank 0, which is at `address`.
        `job`: a word that all ranks of a job have. Waits for all ranks."""
        options = _abi.TcpOptions(rank=rank, size=size, port=port, address=address.encode(),
                                  job=None if job is None else job.encode(),
                                  creation_deadline_ms=deadline_ms)
        pointer = c_void_p()
        check(lib.megamoe_comm_tcp(byref(options), byref(pointer)))
        return cls(pointer.value)

    @classmethod
    def from_allgather(cls, rank: int, size: int, allgather: Callable[[bytes], Sequence[bytes]], *,
                       deadline_ms: int = 0) -> "Comm":
        """This process's rank, brought together with the others by a function of the caller's.

        `allgather` is collective and called twice at most: it takes up to 1024 bytes and returns
        those of all ranks, in their order. It is not used any more once this returns.
        """
        failure: list[BaseException] = []

        def gather(user, mine, everything, count, timeout_ms) -> int:
            try:
                parts = allgather(ctypes.string_at(mine, count))
                if len(parts) != size or any(len(part) != count for part in parts):
                    raise InvalidArgumentError(f"allgather: expected {size} times {count} bytes")
                ctypes.memmove(everything, b"".join(parts), size * count)
                return 0
            except BaseException as error:  # it is raised below, beyond the C frames
                failure.append(error)
                return 1

        bootstrap = _abi.Bootstrap(rank=rank, size=size, creation_deadline_ms=deadline_ms,
                                   allgather=_abi.ALLGATHER_FN(gather))
        pointer = c_void_p()
        status = lib.megamoe_comm_custom(byref(bootstrap), byref(pointer))
        if failure:
            raise failure[0]
        check(status)
        return cls(pointer.value)

    @classmethod
    def from_transport(cls, rank: int, size: int, allgather: Callable[[bytes], Sequence[bytes]],
                       alltoallv: Callable[[list[memoryview], list[memoryview]], None], *,
                       abort: Callable[[], None] | None = None,
                       deadline_ms: int = 0) -> "Comm":
        """This process's rank among ranks that may be on several hosts, of CPU devices: the
        caller carries their messages.

        allgather: as in `from_allgather`, of any number of bytes. alltoallv(send, receive):
        collective; send[r] goes to rank r, and what that one sends, of the size of receive[r], is
        written there. Both are called by threads that make workspaces or compute forwards, one at a
        time, and block. abort: ends the waits of the others, if that can be done.
        """
        def gather(user, mine, everything, count, timeout_ms) -> None:
            parts = allgather(ctypes.string_at(mine, count))
            if len(parts) != size or any(len(part) != count for part in parts):
                raise InvalidArgumentError(f"allgather: expected {size} times {count} bytes")
            ctypes.memmove(everything, b"".join(parts), size * count)

        def exchange(user, send, send_bytes, send_offsets, receive, receive_bytes,
                     receive_offsets, timeout_ms) -> None:
            alltoallv([_bytes_at(send, send_offsets[r], send_bytes[r]) for r in range(size)],
                      [_bytes_at(receive, receive_offsets[r], receive_bytes[r])
                       for r in range(size)])

        failure: list[BaseException] = []

        def guarded(function: Callable[..., None]) -> Callable[..., int]:
            def call(*arguments) -> int:
                try:
                    function(*arguments)
                    return 0
                except BaseException as error:  # beyond the C frames the status tells of it
                    failure.append(error)
                    return 1
            return call

        transport = _abi.Transport(rank=rank, size=size, creation_deadline_ms=deadline_ms,
                                   allgather=_abi.ALLGATHER_FN(guarded(gather)),
                                   alltoallv=_abi.ALLTOALLV_FN(guarded(exchange)))
        if abort:
            transport.abort = _abi.USER_FN(lambda user: abort())
        pointer = c_void_p()
        status = lib.megamoe_comm_transport(byref(transport), byref(pointer))
        if failure:
            raise failure[0]
        check(status)
        comm = cls(pointer.value)
        comm._keep = transport  # whose functions are called until the communicator is closed
        return comm

    def allgather(self, mine: bytes) -> list[bytes]:
        """Collective: the bytes of all ranks, in their order; all bring the same number, not 0."""
        everything = ctypes.create_string_buffer(max(1, self.size * len(mine)))
        check(lib.megamoe_comm_allgather(self.pointer, mine, everything, len(mine)))
        return [everything.raw[rank * len(mine):(rank + 1) * len(mine)]
                for rank in range(self.size)]

    def abort(self) -> None:
        """Makes the waits of all ranks end with PeerError. Any thread may call it."""
        lib.megamoe_comm_abort(self.pointer)

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, size={self.size})"
