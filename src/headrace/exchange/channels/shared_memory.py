"""Moves weights between processes of one machine: one copy into one of two shared segments, views for every reader.

    publisher                     segment A: version 7   <-- shared lock -- reader 1, reader 2   (views, no copy)
      fills B, then hands out     segment B: version 8
      the ticket of version 8       ^ exclusive lock while it is being filled

A segment is an anonymous file in memory (memfd) that readers open through /proc/PUBLISHER/fd: it has no name, so nothing
is left behind whichever process is killed. A lease is a lock of the kernel's on that file: it ends with its reader.
A lease that is held too long (a stopped reader) never lets bytes change under it: the publisher leaves the whole segment
to that reader and takes a fresh one; the reader's next read of an old ticket is refused.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import struct
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping

import torch

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels.base import Channel
from headrace.exchange.channels.layout import Layout, checksum, fill, parse_manifest, plan, views
from headrace.types import MAIN_POLICY, NO_VERSION, Scope, WeightTicket

_HEADER = struct.Struct("<16sqQQQ")  # token, version, bytes of the manifest, where the data starts, its capacity
_PAGE_BYTES = 4096
_POLL_S = 0.002


class SharedMemoryChannel(Channel):
    """One publisher process and any number of readers. The object itself travels; each end opens what it needs.

    Every `read` needs one `release`, after which its views may change.
    """

    one_machine = True

    def __init__(self, lease_timeout_s: float = 5.0) -> None:
        super().__init__()
        self.lease_timeout_s = lease_timeout_s
        self._slots: dict[str, list[_Segment]] = {}  # publisher: per policy, the latest last, at most two
        self._attached: dict[str, _Attachment] = {}  # reader: by locator, in order of first use
        self._leases: dict[tuple[str, int], _Attachment] = {}

    def settings(self) -> dict[str, object]:
        return {"lease_timeout_s": self.lease_timeout_s}

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        policy: str = MAIN_POLICY,
        scope: Scope = "full",
    ) -> WeightTicket:
        self._begin(version, policy)
        named = list(tensors)
        layout = plan(named)
        slots = self._slots.setdefault(policy, [])
        segment = self._lock_spare(slots, layout)
        try:
            digest = segment.write(layout, named, version, policy)
        except BaseException:
            segment.close()
            raise
        segment.unlock()
        slots.append(segment)
        ticket = WeightTicket(
            policy=policy,
            version=version,
            scope=scope,
            locator=segment.locator,
            checksum=digest,
            bytes=layout.bytes,
        )
        self._remember(ticket)
        return ticket

    def read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        attachment = self._attached.get(ticket.locator)
        if attachment is None:
            attachment = self._attached[ticket.locator] = _Attachment(ticket)
        layout = attachment.lease(ticket)
        try:
            memory = attachment.memory
            if checksum(memory, layout, ticket.version, ticket.policy) != ticket.checksum:
                raise PartFailed(f"weights of version {ticket.version} do not match their checksum")
            found = views(memory, layout)
        except BaseException:
            attachment.release()
            raise
        self._leases[ticket.policy, ticket.version] = attachment
        self._remember(ticket)
        self._detach_old()
        return found

    def release(self, ticket: WeightTicket) -> None:
        attachment = self._leases.get((ticket.policy, ticket.version))
        if attachment is not None and attachment.release():
            del self._leases[ticket.policy, ticket.version]

    def close(self) -> None:
        """Readers keep what they have leased; nobody else can attach any more."""
        super().close()
        for slots in self._slots.values():
            for segment in slots:
                segment.close()
        self._slots.clear()
        for attachment in self._attached.values():
            attachment.close()
        self._attached.clear()
        self._leases.clear()

    def _lock_spare(self, slots: list[_Segment], layout: Layout) -> _Segment:
        """The older of two segments, locked, once its readers have released it; a fresh one when they do not, when it is
        too small, or when there are not two yet."""
        if len(slots) == 2:
            spare = slots.pop(0)
            if not spare.fits(layout):
                spare.close()
            elif spare.lock(self.lease_timeout_s):
                return spare
            else:
                self.reclaimed += 1
                spare.retire()
                spare.close()
        segment = _Segment(layout)
        segment.lock(0.0)
        return segment

    def _detach_old(self) -> None:
        """Unmap what no lease needs, but for the two newest segments of each policy: those will be filled again."""
        kept: dict[str, int] = {}
        for locator, attachment in reversed(list(self._attached.items())):
            kept[attachment.policy] = kept.get(attachment.policy, 0) + 1
            if kept[attachment.policy] > 2 and not attachment.leases:
                attachment.close()
                del self._attached[locator]


class _Segment:
    """The publisher's side of one slot: header, manifest, data on a page border."""

    def __init__(self, layout: Layout) -> None:
        self._token = secrets.token_bytes(16)
        self._manifest_room = 2 * len(layout.manifest())  # names may change a little without a new segment
        self._start = -(-(_HEADER.size + self._manifest_room) // _PAGE_BYTES) * _PAGE_BYTES
        self._capacity = layout.capacity
        size = self._start + self._capacity
        self._path: str | None = None
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create(f"headrace-{self._token.hex()}", os.MFD_CLOEXEC)
            self.locator = f"memfd:{os.getpid()}:{self._file}:{self._token.hex()}"
        else:  # no anonymous files here: a named one, unlinked at close
            self._file, self._path = tempfile.mkstemp(prefix=f"headrace-{self._token.hex()}-")
            self.locator = f"file:{self._path}:{self._token.hex()}"
        os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def fits(self, layout: Layout) -> bool:
        return layout.capacity <= self._capacity and len(layout.manifest()) <= self._manifest_room

    def lock(self, timeout_s: float) -> bool:
        """Take the segment for writing; False when readers still hold it after the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def write(self, layout: Layout, named: list[tuple[str, torch.Tensor]], version: int, policy: str) -> str:
        """Fill it and return the checksum. The version is invalid until the last byte stands."""
        manifest = layout.manifest()
        self._write_header(NO_VERSION, len(manifest))
        self._map[_HEADER.size : _HEADER.size + len(manifest)] = manifest
        memory = torch.frombuffer(self._map, dtype=torch.uint8, offset=self._start, count=self._capacity)
        fill(memory, layout, named)
        self._write_header(version, len(manifest))
        return checksum(memory, layout, version, policy)

    def retire(self) -> None:
        """Refuse every later lease. Who holds one keeps whole bytes: only the header changes."""
        _HEADER.pack_into(self._map, 0, self._token, NO_VERSION, 0, self._start, self._capacity)

    def _write_header(self, version: int, manifest_bytes: int) -> None:
        _HEADER.pack_into(self._map, 0, self._token, version, manifest_bytes, self._start, self._capacity)

    def close(self) -> None:
        """Leave it to the readers that hold it; without any, its memory is free."""
        self.unlock()
        os.close(self._file)
        del self._map
        if self._path is not None:
            os.unlink(self._path)


class _Attachment:
    """A reader's side of one slot, read-only. The mapping is kept between versions: the slot will be filled again."""

    def __init__(self, ticket: WeightTicket) -> None:
        self.policy = ticket.policy
        self.leases = 0
        self._file, self._token = _open_segment(ticket)
        try:
            size = os.fstat(self._file).st_size
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(self._file, size, flags=flags, prot=mmap.PROT_READ)
            token, _, _, start, capacity = _HEADER.unpack_from(self._map, 0)
            if token != self._token or start + capacity != size:
                raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is not kept any more")
        except BaseException:
            os.close(self._file)
            raise
        with warnings.catch_warnings():  # torch has no read-only tensors and says so
            warnings.simplefilter("ignore")
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=capacity)

    def lease(self, ticket: WeightTicket) -> Layout:
        """Lock the slot against the publisher, *then* look which version it holds."""
        if not self.leases:
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is being overwritten") from None
        self.leases += 1
        _, version, manifest_bytes, _, _ = _HEADER.unpack_from(self._map, 0)
        if version != ticket.version:
            self.release()
            raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is not kept any more")
        return parse_manifest(self._map[_HEADER.size : _HEADER.size + manifest_bytes])

    def release(self) -> bool:
        """True when this was the last lease."""
        self.leases -= 1
        if not self.leases:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return not self.leases

    def close(self) -> None:
        """Unlock and unmap; memory that a view still shows stays mapped until that view is gone."""
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping holds a duplicate, which would keep the lock
        os.close(self._file)
        del self.memory


def _open_segment(ticket: WeightTicket) -> tuple[int, bytes]:
    """Open the segment that a ticket names: (file descriptor with locks of its own, token)."""
    kind, *rest = ticket.locator.split(":")
    try:
        if kind == "memfd" and len(rest) == 3 and rest[0].isdigit() and rest[1].isdigit():
            pid, descriptor, token = rest
            path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
            if f"headrace-{token}" not in os.readlink(path):  # the number was used again for something else
                raise FileNotFoundError(path)
        elif kind == "file" and len(rest) == 2:
            path, token = rest
        else:
            raise PartFailed(f"not a ticket of the shared_memory channel: {ticket.locator!r}")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise StaleTicket(
            f"version {ticket.version} of {ticket.policy!r} is gone: its publisher has replaced it, closed or died"
        ) from None
    except PermissionError as error:
        raise PartFailed(
            f"cannot attach to the publisher of {ticket.policy!r}: {error}; run both as one user"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is gone")
    return file, bytes.fromhex(token)
