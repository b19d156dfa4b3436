"""Parts: what stands behind a key in the keys of its rows, and tells its pieces of state apart."""

from penstock.errors import InvalidError

NAME, LIST, MAP, TIMER = b"n", b"l", b"m", b"t"
MAX_NAME_BYTES = 64


def name_part(kind: bytes, name: str) -> bytes:
    raw = name.encode() if isinstance(name, str) else b""
    if not raw or len(raw) > MAX_NAME_BYTES or b"\x00" in raw:
        raise InvalidError(
            f"{name!r} cannot name a piece of state: a name is a text of 1 to {MAX_NAME_BYTES} bytes; "
            f"for many names that come from data, use state.map(name)"
        )
    return kind + raw + b"\x00"


def name_of(part: bytes) -> str:
    """The name that a part of a row key was made of."""
    return part[1 : part.index(b"\x00")].decode()
