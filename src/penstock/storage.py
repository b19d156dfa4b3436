"""Durable objects, through four verbs: read, create if absent, list, delete.

Invariants:

* An object never changes: `create` is the only way to make one, and it never overwrites.
* An object is whole or absent, for every reader, whatever is killed and whenever.
* Of any number of concurrent creators of one name exactly one wins, and all learn which bytes stand there.
* "It failed" and "we do not know" are different answers; nothing is concluded from the second without a look.
* Names sort by their characters, the same on a disk as in a bucket.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, ObjectStore, from_url

from penstock.disk import FolderOnDisk
from penstock.errors import InvalidError, MissingError, OutcomeUnknownError, StorageError
from penstock.names import check_name, check_range, folder_of, missing

if TYPE_CHECKING:
    from obstore import OffsetRange, SuffixRange
    from typing_extensions import Buffer

MAX_SETTLE_ATTEMPTS = 5
"""How often `settle` tries before it gives up; the clients of object stores retry below it, with pauses."""

_CLOUD_SCHEMES = ("s3", "gs", "az")
Data = TypeVar("Data", bound="Buffer")


class Storage(Protocol):
    """Where durable objects live; names are relative and like `epochs/7.json`.

    Every implementation promises what this docstring and those of the verbs say, to any number of threads and
    processes at once; `penstock.testing.StorageContract` checks it. Objects never change, and are whole or absent.

    >>> storage = open_storage("memory://example")
    >>> storage.create("epochs/7.json", b"{}")
    True
    >>> storage.read("epochs/7.json")
    b'{}'
    """

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from `start` to before `end`, clipped to the object as a slice is.

        A negative `start`, without `end`, asks for that many bytes from the end of the object.
        Raises `MissingError` where there is no such object.
        """
        ...

    def create(self, name: str, data: "Buffer") -> bool:
        """Make the object if its name is free, and say whether we did; one that is there is left as it is.

        Raises `OutcomeUnknownError` when the answer was lost, and `StorageError` when it certainly failed.
        """
        ...

    def list(self, prefix: str, after: str = "") -> list[str]:
        """The full names of all objects in the folder `prefix` and below it ("" for all) that sort behind `after`."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove these objects; those that are not there are no error."""
        ...


def open_storage(url: str | Path) -> Storage:
    """The storage at a path, `file://`, `memory://name`, `s3://bucket/folder`, `gs://…` or `az://…`.

    A folder is made when the first object is. `memory://name` is the same storage wherever this process opens it.
    Credentials, region and endpoint of the cloud stores come from their usual environment variables
    (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`, …).

    >>> open_storage("memory://shared").create("a", b"1")
    True
    >>> open_storage("memory://shared").create("a", b"2")
    False
    """
    if isinstance(url, Path) or "://" not in url:
        return FolderOnDisk(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderOnDisk(Path(unquote(parts.path)))
    if parts.scheme == "memory":
        memory = _ObjectStoreStorage(_shared_memory(parts.netloc), f"memory://{parts.netloc}")
        return sub(memory, parts.path.strip("/")) if parts.path.strip("/") else memory
    if parts.scheme in _CLOUD_SCHEMES and parts.netloc:
        return _open_cloud(url)
    raise InvalidError(
        f"storage cannot be opened at {url!r}: its scheme or host is not supported; "
        "use a folder, file://, memory://, s3://, gs:// or az://"
    )


def memory_storage() -> Storage:
    """A storage in this process's memory that nobody else has.

    >>> memory_storage().list("")
    []
    """
    return _ObjectStoreStorage(MemoryStore(), "memory://")


def sub(storage: Storage, prefix: str) -> Storage:
    """A folder of another storage as a storage of its own: the same objects, by shorter names.

    >>> whole = open_storage("memory://whole")
    >>> part = sub(whole, "totals/epochs")
    >>> part.create("7.json", b"{}")
    True
    >>> whole.list(""), part.list("")
    (['totals/epochs/7.json'], ['7.json'])
    """
    check_name(prefix)
    return _Folder(storage, prefix)


def settle(storage: Storage, name: str, data: Data) -> Data | bytes:
    """What stands under `name` after trying to create it with `data`: equal to `data` if we won, else the winner's.

    A lost answer, or an "exists" that a client's own retry brought about, is recognised as our own write by the bytes
    that stand there; so `data` must hold something that no other writer writes, where it matters who won.
    Raises `OutcomeUnknownError` when after `MAX_SETTLE_ATTEMPTS` attempts it is still not known.

    >>> storage = open_storage("memory://settled")
    >>> settle(storage, "leader", b"we"), settle(storage, "leader", b"they")
    (b'we', b'we')
    """
    lost: StorageError | None = None
    for _ in range(MAX_SETTLE_ATTEMPTS):
        try:
            if storage.create(name, data):
                return data
        except OutcomeUnknownError as error:
            lost = error
        try:
            return storage.read(name)
        except StorageError as error:
            # Not there (yet), or not readable now: creating again is safe either way, as it never overwrites.
            lost = error
    raise OutcomeUnknownError(
        f"it is not known whether {name!r} was created, after {MAX_SETTLE_ATTEMPTS} attempts; "
        "check that the storage can be reached, and start again"
    ) from lost


class _ObjectStoreStorage:
    """A store of `obstore`: memory, S3, GCS or Azure."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        check_name(name)
        check_range(name, start, end)
        with self._translated("read", name, StorageError):
            if start == 0 and end is None:
                return bytes(obstore.get(self._store, name).bytes())
            try:
                return bytes(obstore.get(self._store, name, options={"range": _wanted(start, end)}).bytes())
            except (exceptions.GenericError, exceptions.NotSupportedError, ValueError):
                # Stores refuse a range that begins at the end, and Azure knows no suffixes; the size settles it.
                return self._read_clipped(name, start, end)

    def _read_clipped(self, name: str, start: int, end: int | None) -> bytes:
        first, last, _ = slice(start, end).indices(obstore.head(self._store, name)["size"])
        return bytes(obstore.get_range(self._store, name, start=first, end=last)) if first < last else b""

    def create(self, name: str, data: "Buffer") -> bool:
        check_name(name)
        with self._translated("create", name, OutcomeUnknownError):
            try:
                # In one request: the parts of a multipart upload cannot be made conditional on every store.
                obstore.put(self._store, name, memoryview(data).cast("B"), mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError:
                return False
        return True

    def list(self, prefix: str, after: str = "") -> list[str]:
        folder = folder_of(prefix)
        with self._translated("list", prefix, StorageError):
            pages = obstore.list(self._store, folder.rstrip("/") or None, offset=after or None)
            # Filtered again, as obstore drops a "/" at the end of the offset, and some stores ignore the offset.
            return sorted(meta["path"] for page in pages for meta in page if meta["path"] > after)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
            # One by one, as a batch stops at the first absent name on some stores.
            with self._translated("delete", name, StorageError):
                try:
                    obstore.delete(self._store, name)
                except (FileNotFoundError, exceptions.NotFoundError):
                    continue

    @contextmanager
    def _translated(self, verb: str, name: str, otherwise: type[StorageError]) -> Iterator[None]:
        """Errors of `obstore` as ours; `otherwise` is what an error means that does not say whether it happened."""
        failed = f"cannot {verb} {name!r} in {self._url}"
        try:
            yield
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            if verb == "read":
                raise MissingError(missing(name, self._url)) from error
            raise StorageError(f"{failed}: the bucket does not exist; create it, or correct the URL") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise StorageError(f"{failed}: access denied; check the credentials and what they allow") from error
        except (exceptions.NotSupportedError, exceptions.InvalidPathError, NotImplementedError, ValueError) as error:
            raise InvalidError(f"{failed}: {_first_line(error)}; use a storage or a name that allows it") from error
        except (exceptions.BaseError, OSError) as error:
            raise otherwise(f"{failed}: {_first_line(error)}; try again when the storage can be reached") from error


class _Folder:
    """A folder of another storage; see `sub`."""

    def __init__(self, inner: Storage, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix + "/"

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        check_name(name)
        return self._inner.read(self._prefix + name, start, end)

    def create(self, name: str, data: "Buffer") -> bool:
        check_name(name)
        return self._inner.create(self._prefix + name, data)

    def list(self, prefix: str, after: str = "") -> list[str]:
        folder = (self._prefix + folder_of(prefix)).rstrip("/")
        names = self._inner.list(folder, self._prefix + after)
        return [name.removeprefix(self._prefix) for name in names]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        self._inner.delete([self._prefix + name for name in names])


_memories: dict[str, MemoryStore] = {}
_memories_lock = threading.Lock()


def _shared_memory(name: str) -> MemoryStore:
    with _memories_lock:
        return _memories.setdefault(name, MemoryStore())


def _open_cloud(url: str) -> Storage:
    try:
        return _ObjectStoreStorage(from_url(url), url)
    except (exceptions.BaseError, ValueError) as error:
        raise InvalidError(f"storage cannot be opened at {url!r}: {_first_line(error)}; correct the URL") from error


def _wanted(start: int, end: int | None) -> "tuple[int, int] | OffsetRange | SuffixRange":
    if end is not None:
        return start, end
    return {"suffix": -start} if start < 0 else {"offset": start}


def _first_line(error: Exception) -> str:
    # obstore appends a many-line dump of its inner error, which stays readable in the cause.
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
