"""The directory of a store: its lock, its file names, and what is removed when.

Blocking system calls throughout; the store calls it off the loop. A directory belongs to one store
at a time: whoever holds the lock (man 2 flock) on ``hsswap.lock`` in it, which the kernel gives
back when a process dies. Only our own file names are ever touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hsswap.errors import BlockIOError, ConfigError, HsswapError, StoreLocked
from hsswap.forked import watch
from hsswap.io.manifest import MANIFEST_NAME
from hsswap.io.problems import from_os_error, is_named, lost

LOCK_NAME = "hsswap.lock"
SEGMENT_NAME = re.compile(r"segment-\d{8}\.kv")
TEMPORARY_PREFIX = "hsswap-"
LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
LOCK_ATTEMPTS = 100
"""A lock file that its owner removes while we open it is tried again; never more than a few times
unless others open and close stores there without end."""

UNUSABLE = {
    errno.ENOTDIR: "is not a directory; name another one",
    errno.EEXIST: "is not a directory; name another one",
    errno.ENOENT: "cannot be made; name another directory",
    errno.EACCES: "cannot be written to; name a directory that this user may write to",
    errno.EPERM: "cannot be written to; name a directory that this user may write to",
    errno.EROFS: "is on a read-only file system; name another directory",
    errno.ELOOP: f"has a symbolic link where {LOCK_NAME} belongs; remove it",
    errno.ENAMETOOLONG: "is too long a name; choose a shorter one",
}
"""Faults of the directory named, by error number; others are faults of the drive."""


class StoreDirectory:
    """A directory locked by this process. ``path`` is absolute; ``keep``: of a persistent store.

    ``close()`` removes the segments, unless the store is persistent (``keep``), the lock file, and
    the directory itself with its parents as far as they were made here and are empty.
    """

    def __init__(self, path: Path, lock: int, made: list[Path], *, keep: bool = False) -> None:
        self.path = path
        self.keep = keep
        self._lock = lock
        self._made = made
        self._closed = False
        watch(self, StoreDirectory._in_child)

    def _in_child(self) -> None:
        """Do not keep the lock of a parent that dies."""
        if not self._closed:
            self._closed = True
            os.close(self._lock)

    @classmethod
    def open(cls, path: Path | str | None, *, keep: bool = False) -> StoreDirectory:
        """Lock a directory, make it where it is missing, and remove a killed predecessor's files.

        ``keep``: for a persistent store; its files stay, now and at the end. Without it, a
        directory with a persistent store is refused.

        None: a new directory in the system's temporary folder, where those of killed processes are
        removed too. Raises StoreLocked when another store has it, ConfigError when it cannot be
        used as a directory, OutOfSpace or BlockIOError when the drive cannot.
        """
        if path is None:
            with _named("the temporary folder"):
                _sweep_temporary()
        for _ in range(LOCK_ATTEMPTS):
            made: list[Path] = []
            place = Path(path).absolute() if path is not None else None
            try:
                with _named(f"store directory {place or tempfile.gettempdir()}"):
                    if place is None:
                        place = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)).absolute()
                        made.append(place)
                    else:
                        made.extend(_make(place))
                    lock = _lock(place, create=True)
                    if lock is not None:
                        return cls._adopt(place, lock, made, keep=keep)
            except StoreLocked:
                if path is not None:
                    raise
                continue  # somebody else's sweep has it: leave it to him
            except HsswapError:
                _remove_directories(made)
                raise
        raise StoreLocked(f"{path}: other stores open and close there all the time; name another")

    @classmethod
    def _adopt(cls, path: Path, lock: int, made: list[Path], *, keep: bool) -> StoreDirectory:
        """Take over a directory whose lock is ours."""
        try:
            if not keep and (path / MANIFEST_NAME).exists():
                raise ConfigError(
                    f"store directory {path} holds a persistent store; open it with persist=True, "
                    "name another directory, or remove it"
                )
            if not made and os.pread(lock, 64, 0).endswith(b"made\n"):
                made = [path]  # by a predecessor that was killed
            os.ftruncate(lock, 0)
            note = f"{os.getpid()} {'made' if made else 'found'}\n"
            os.pwrite(lock, note.encode(), 0)
            if not keep:
                _remove_segments(path)
        except BaseException:
            with suppress(OSError):
                (path / LOCK_NAME).unlink()
            os.close(lock)
            raise
        return cls(path, lock, made, keep=keep)

    def check_kept(self) -> None:
        """Raise BlockIOError unless a later store finds this one here: its lock and manifest are
        there, and the lock is ours.
        """
        place = self.path / LOCK_NAME
        with _named(f"store directory {self.path}"):
            if not is_named(place, self._lock):
                raise lost(f"keeping {place}")
            if not (self.path / MANIFEST_NAME).exists():
                raise lost(f"keeping {self.path / MANIFEST_NAME}")

    def close(self) -> None:
        """Remove what is ours and unlock. Twice is fine. Raises BlockIOError at the end.

        A directory that went away meanwhile is let go, and so is one in its place that another
        store has locked.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with _named(f"store directory {self.path}"):
                if not self._is_here():
                    return
                try:
                    if not self.keep:
                        _remove_segments(self.path)
                finally:
                    # While the lock is held, so that nobody else's is removed.
                    (self.path / LOCK_NAME).unlink(missing_ok=True)
        finally:
            os.close(self._lock)
            _remove_directories(self._made)

    def _is_here(self) -> bool:
        """Whether the directory is there, and nobody else's."""
        place = self.path / LOCK_NAME
        return is_named(place, self._lock) or (self.path.is_dir() and not os.path.lexists(place))


def segment_name(number: int) -> str:
    """The file name of a segment."""
    return f"segment-{number:08d}.kv"


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn OSError into an error of ours with a remedy."""
    try:
        yield
    except OSError as error:
        unusable = UNUSABLE.get(error.errno or 0)
        if unusable is not None:
            raise ConfigError(f"{what} {unusable} ({error.strerror})") from error
        problem: BlockIOError = from_os_error(error, what)
        raise problem from error


def _make(path: Path) -> list[Path]:
    """Make a directory and its missing parents, mode 0700. Returns those made, outermost first."""
    missing = []
    for place in (path, *path.parents):
        if place.exists():
            break
        missing.append(place)
    made: list[Path] = []
    for place in reversed(missing):
        try:
            place.mkdir(mode=0o700)
        except FileExistsError:
            continue  # by somebody else, just now
        except OSError:
            _remove_directories(made)
            raise
        made.append(place)
    return made


def _remove_directories(made: list[Path]) -> None:
    """Remove directories, outermost first in the list, as far as they are empty."""
    with suppress(OSError):
        for place in reversed(made):
            place.rmdir()


def _remove_segments(path: Path) -> None:
    for name in os.listdir(path):
        if SEGMENT_NAME.fullmatch(name):
            (path / name).unlink(missing_ok=True)


def _lock(path: Path, *, create: bool) -> int | None:
    """A descriptor that holds the lock of a directory, or None: try again, it went away meanwhile.

    Raises StoreLocked with the owner's process id.
    """
    place = path / LOCK_NAME
    try:
        descriptor = os.open(place, LOCK_FLAGS | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        if create and path.is_dir():
            raise  # /proc and its like: nothing can be made there
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, named = os.fstat(descriptor), place.stat(follow_symlinks=False)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 64, 0).split()
        os.close(descriptor)
        by = f"process {int(owner[0])}" if owner and owner[0].isdigit() else "another process"
        raise StoreLocked(
            f"store directory {path} is in use by {by}; end it or name another directory"
        ) from error
    except FileNotFoundError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    if not os.path.samestat(ours, named):
        os.close(descriptor)
        return None
    return descriptor


def _may_be_left(entry: os.DirEntry[str]) -> bool:
    """Whether it may be a temporary store directory of this user."""
    if not (entry.name.startswith(TEMPORARY_PREFIX) and entry.is_dir(follow_symlinks=False)):
        return False
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:  # its owner closed it just now
        return False


def _sweep_temporary() -> None:
    """Remove temporary store directories of this user whose owner is dead."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [Path(entry.path) for entry in entries if _may_be_left(entry)]
    for path in found:
        # In use, vanished or not to be removed: all the same, it is not ours to complain about.
        with suppress(OSError, StoreLocked):
            lock = _lock(path, create=False)
            if lock is not None:
                StoreDirectory(path.absolute(), lock, [path]).close()
