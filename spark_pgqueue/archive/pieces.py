"""The bytes of a file, with digests: those of its pieces, which are the row groups and the footer.

The footer has the digest of each row group, and the manifest has the digest of the footer. So a
reader of some row groups verifies every byte that it decodes, without reading the rest.
"""

from __future__ import annotations

import hashlib
import io
import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData

KEY = "pgqueue.row_groups"
"""The footer's metadata of this name has a list with a `Piece` for each row group, as JSON."""


class Piece(NamedTuple):
    """A part of a file.

    Attributes:
        offset: where it begins.
        bytes: its size.
        sha256: its digest, in hexadecimal.
    """

    offset: int
    bytes: int
    sha256: str

    def read(self, source: pa.NativeFile) -> bytes:
        """Its bytes.

        Raises:
            ValueError: they have another digest.
        """
        found = source.read_at(self.bytes, self.offset)
        if hashlib.sha256(found).hexdigest() != self.sha256:
            raise ValueError(
                f"{self.bytes} bytes from byte {self.offset} on do not have the SHA-256 that was "
                "recorded when they were written"
            )
        return found


class Written(io.RawIOBase):
    """Passes on what is written, and digests it.

    Args:
        stream: where it goes.
    """

    def __init__(self, stream: pa.NativeFile):
        self._stream, self._whole, self._piece = stream, hashlib.sha256(), hashlib.sha256()
        self._begin = self._end = 0

    def writable(self) -> bool:
        """As of a file."""
        return True

    def write(self, data: Any) -> int:
        """As of a file."""
        self._stream.write(data)
        for each in (self._whole, self._piece):
            each.update(data)
        self._end += len(data)
        return len(data)

    def tell(self) -> int:
        """As of a file."""
        return self._end

    def piece(self) -> Piece:
        """What was written since the last call."""
        found = Piece(self._begin, self._end - self._begin, self._piece.hexdigest())
        self._begin, self._piece = self._end, hashlib.sha256()
        return found

    @property
    def sha256(self) -> str:
        """The digest of all that was written."""
        return self._whole.hexdigest()


class OfPiece(io.RawIOBase):
    """A file of which only one piece is there to read.

    Args:
        found: the bytes of the piece.
        offset: where it begins.
        size: of the file.
    """

    def __init__(self, found: bytes, offset: int, size: int):
        self._found, self._offset, self._size, self._at = memoryview(found), offset, size, 0

    def readable(self) -> bool:
        """As of a file."""
        return True

    def seekable(self) -> bool:
        """As of a file."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of a file."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        """As of a file."""
        return self._at

    def read(self, size: int = -1) -> memoryview:  # type: ignore[override]
        """As of a file; nothing outside the piece."""
        first = self._at - self._offset
        found = self._found[first : first + size] if first >= 0 else self._found[:0]
        self._at += len(found)
        return found


def row_groups(metadata: FileMetaData, footer: Piece) -> list[Piece]:
    """The pieces of a file before its footer, as the footer names them.

    Raises:
        ValueError: they are not one for each row group, and all of the file.
    """
    try:
        found = [Piece(*each) for each in json.loads((metadata.metadata or {})[KEY.encode()])]
        ends = [0, *(each.offset + each.bytes for each in found)]
        is_whole = ends == [each.offset for each in (*found, footer)]
    except (KeyError, TypeError, ValueError):
        is_whole, found = False, []
    if not is_whole or len(found) != metadata.num_row_groups:
        raise ValueError(f"{KEY} of its footer does not name all row groups")
    return found
