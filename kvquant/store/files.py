"""Every system call the disk tier makes on its files, so that a test can stand in for any of them; and its folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ..errors import StoreError, shown

Buffers = Sequence[memoryview]
LOCK = "lock"
_DIGITS = 20  # that the lock's file has room for


class Files:
    """The calls as the system offers them. Each raises `OSError`; transfers may move fewer bytes than asked for."""

    def open(self, name: str, flags: int, folder: int | None = None) -> int:
        """A descriptor of ``name`` within ``folder``, mode 0600 where it is made; never through a symbolic link."""
        # Without O_NONBLOCK a pipe of that name would hang us.
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)

    def close(self, file: int) -> None:
        """Let go of a descriptor."""
        os.close(file)

    def size(self, file: int) -> int:
        """Bytes from the first to the last."""
        return os.fstat(file).st_size

    def preadv(self, file: int, buffers: Buffers, at: int) -> int:
        """Fill ``buffers`` in turn; how many bytes came, 0 at the end of the file."""
        return os.preadv(file, buffers, at)

    def pwritev(self, file: int, buffers: Buffers, at: int) -> int:
        """Write ``buffers`` one behind the other; how many bytes went."""
        return os.pwritev(file, buffers, at)

    def allocate(self, file: int, at: int, nbytes: int) -> None:
        """Have the file system set blocks aside, which makes the file longer."""
        os.posix_fallocate(file, at, nbytes)

    def truncate(self, file: int, nbytes: int) -> None:
        """Set the size, of a longer file with a hole at its end."""
        os.ftruncate(file, nbytes)

    def advise(self, file: int, at: int, nbytes: int) -> None:
        """Say that these bytes will be read soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, at, nbytes, os.POSIX_FADV_WILLNEED)

    def lock(self, file: int) -> bool:
        """Take the file's exclusive lock; False where another description of it, of any process, has it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Folder:
    """A store's folder, and the writer's lock on it until it is closed. Raises `StoreError` where it cannot be had."""

    def __init__(self, files: Files, path: Path, *, read_only: bool) -> None:
        self.files, self.path, self.read_only = files, path, read_only
        self._folder = _open_folder(path, create=not read_only)
        self._lock: int | None = None
        try:
            self._lock = None if read_only else self._locked()
        except BaseException:
            self.close()
            raise

    def open(self, name: str) -> int:
        """A regular file of the folder, readable by its owner alone; no link, nor anything else of that name."""
        flags = os.O_RDONLY if self.read_only else os.O_RDWR | os.O_CREAT
        try:
            file = self.files.open(name, flags, self._folder)
        except OSError as error:
            what = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise StoreError(f"{self.path / name}: {what}; allowed: a regular file this process may open") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            self.files.close(file)
            raise StoreError(f"{self.path / name}: not a regular file; allowed: one")
        if not self.read_only:
            os.fchmod(file, 0o600)  # whatever the umask made of it
        return file

    def open_direct(self, name: str) -> int | None:
        """A descriptor that reads past the system's cache, None where there is no such thing."""
        with contextlib.suppress(AttributeError, OSError):
            return self.files.open(name, os.O_RDONLY | os.O_DIRECT, self._folder)
        return None

    def footprint(self) -> int:
        """Bytes of all its files."""
        with os.scandir(self._folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)

    def close(self) -> None:
        """Let go of it, and of the lock."""
        os.close(self._folder)
        if self._lock is not None:
            self.files.close(self._lock)

    def _locked(self) -> int:
        lock = self.open(LOCK)
        if not self.files.lock(lock):
            pid = _told(self.files, lock)
            self.files.close(lock)
            holder = f"process {pid}" if pid else "another process"
            raise StoreError(f"{self.path}: {holder} writes to it; allowed: one writer, read_only=True beside it")
        with contextlib.suppress(OSError):  # the number is for people; the lock is what counts
            self.files.pwritev(lock, [memoryview(f"{os.getpid()}".encode().ljust(_DIGITS))], 0)
        return lock


def writer(path: Path) -> int | None:
    """The process that writes to a store's folder now, 0 where its number is not told, None if there is none.

    For an instant this holds a lock of the kind that readers share, at which a writer that opens just then is refused.
    """
    files = Files()
    try:
        lock = files.open(str(path / LOCK), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _told(files, lock)
    except OSError:  # not every file system has locks; it had none for a writer either
        return None
    finally:
        files.close(lock)
    return None


def _told(files: Files, lock: int) -> int:
    """The number of the process that the lock's file names, or 0."""
    pid = bytearray(_DIGITS)
    with contextlib.suppress(OSError):
        files.preadv(lock, [memoryview(pid)], 0)
    digits = pid.rstrip(b"\0 ")
    return int(digits) if digits.isdigit() else 0


def _open_folder(path: Path, *, create: bool) -> int:
    """A descriptor of the store's folder, made where it may be, mode 0700. Raises `StoreError`.

    A folder that has other things in it is left alone: its permissions are not ours to change.
    """
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise StoreError(f"{shown(str(path))}: no folder for a store ({error}); allowed: a folder, no link") from error
    try:
        names = os.listdir(folder)
        if names and LOCK not in names:
            raise StoreError(f"{path}: a folder with other files in it; allowed: an empty or new one, or a store's")
        if create:
            os.fchmod(folder, 0o700)
    except OSError as error:
        os.close(folder)
        raise StoreError(f"{path}: {error}; allowed: a folder of one's own") from error
    except StoreError:
        os.close(folder)
        raise
    return folder
