"""What can go wrong, grouped by what the caller does next.

::

    PenstockError
    ├── InvalidError               fix your program or your settings
    │   └── LogicError             … namely the function of yours that failed
    ├── ConflictError              stop: another run owns this application
    ├── StorageError               try again
    │   ├── MissingError           there is no object of that name
    │   └── OutcomeUnknownError    a write whose answer was lost: look before you conclude anything
    └── CorruptionError            restore: a stored object is not what was written

Every message says what was found, what was expected, and what to do.
"""


class PenstockError(Exception):
    """Every error that Penstock raises on purpose is one of these.

    >>> try:
    ...     raise StorageError("the disk is full; free some space")
    ... except PenstockError as error:
    ...     print(error)
    the disk is full; free some space
    """


class InvalidError(PenstockError):
    """Your program or your settings ask for something that cannot be; doing the same again fails again.

    >>> from penstock.storage import open_storage
    >>> try:
    ...     open_storage("ftp://host/state")
    ... except InvalidError as error:
    ...     print(error)
    storage cannot be opened at 'ftp://host/state': ... use a folder, file://, memory://, s3://, gs:// or az://
    """


class LogicError(InvalidError):
    """A function of yours failed; the message names the step, the function with its line, the key and the offset.

    The error that your function raised is the cause of this one.

    >>> try:
    ...     try:
    ...         {}["amount"]
    ...     except KeyError as cause:
    ...         raise LogicError("step 'totals' failed") from cause
    ... except LogicError as error:
    ...     print(error, "because of", repr(error.__cause__))
    step 'totals' failed because of KeyError('amount')
    """


class ConflictError(PenstockError):
    """Another run owns this application and went on; this one must stop, and must not try again.

    >>> raise ConflictError("epoch 7 was committed by another run; stop one of the two")
    Traceback (most recent call last):
        ...
    penstock.errors.ConflictError: epoch 7 was committed by another run; stop one of the two
    """


class StorageError(PenstockError):
    """Durable storage refused or failed. Nothing was changed by the call that raised it; try again.

    >>> issubclass(MissingError, StorageError)
    True
    """


class MissingError(StorageError):
    """There is no object of that name.

    >>> from penstock.storage import open_storage
    >>> try:
    ...     open_storage("memory://errors").read("epochs/1.json")
    ... except MissingError as error:
    ...     print(error)
    there is no object 'epochs/1.json' in memory://errors
    """


class OutcomeUnknownError(StorageError):
    """The answer to a write was lost: the write may have happened, or not, or may happen later.

    Read the object to find out; never delete anything because of this error.

    >>> from penstock.storage import open_storage
    >>> from penstock.testing import FaultyStorage
    >>> storage = FaultyStorage(open_storage("memory://unknown"), lose_answer=1)
    >>> try:
    ...     storage.create("a", b"1")
    ... except OutcomeUnknownError:
    ...     print(storage.read("a"))
    b'1'
    """


class CorruptionError(PenstockError):
    """A stored object is not what was written; restore it, or go back to the last epoch that does not need it.

    `name` is the stored object, `found` what is wrong with it, `last_good_epoch` the newest epoch that can still be
    read without it, or None where that is not known. The fields survive copying and the way between processes.

    >>> error = CorruptionError("segments/sum/0/7-a.parquet", "its checksum is 12, 34 was expected", last_good_epoch=6)
    >>> error.name, error.last_good_epoch
    ('segments/sum/0/7-a.parquet', 6)
    >>> print(error)
    'segments/sum/0/7-a.parquet' is damaged: its checksum is 12, 34 was expected; the last good epoch is 6: bring the
    object back from a backup, or start again from epoch 6
    """

    def __init__(self, name: str, found: str, last_good_epoch: int | None = None) -> None:
        super().__init__(_corruption_message(name, found, last_good_epoch))
        self.name = name
        self.found = found
        self.last_good_epoch = last_good_epoch

    def __reduce__(self) -> tuple[type["CorruptionError"], tuple[str, str, int | None]]:
        # By default an exception is rebuilt from its args, and those hold the composed message alone.
        return type(self), (self.name, self.found, self.last_good_epoch)


def _corruption_message(name: str, found: str, last_good_epoch: int | None) -> str:
    if last_good_epoch is None:
        remedy = "no epoch is known that does not need it: bring the object back from a backup"
    else:
        remedy = (
            f"the last good epoch is {last_good_epoch}: bring the object back from a backup, "
            f"or start again from epoch {last_good_epoch}"
        )
    return f"{name!r} is damaged: {found}; {remedy}"
