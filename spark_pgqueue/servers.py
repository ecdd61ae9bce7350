"""A stream that is divided among several servers: each key has a server, by `pgqueue.server_of`.

The page `guide/scale.md` describes the use.
"""

from __future__ import annotations

from hashlib import sha256
from typing import overload

from spark_pgqueue.postgres.errors import PgQueueError


@overload
def server_of(key: str, servers: int) -> int: ...
@overload
def server_of(key: None, servers: int) -> None: ...
def server_of(key: str | None, servers: int) -> int | None:
    """The server of a key, where a stream is on several servers.

    It is the first four bytes of the SHA-256 of the key in UTF-8, as a number without a sign,
    modulo the number of servers. `pgqueue.server_of` and `server_column` return the same.

        >>> [spark_pgqueue.server_of(f"customer {n}", 3) for n in range(5)]
        [0, 1, 2, 1, 1]

    Args:
        key: the key; None for none.
        servers: how many servers there are.

    Returns:
        from 0 to below `servers`; None for a message without a key, which any server may get.

    Raises:
        PgQueueError: `servers` is less than 1, or the key is no text that UTF-8 can hold.
    """
    check_servers(servers)
    if key is None:
        return None
    try:
        digest = sha256(key.encode()).digest()
    except (AttributeError, UnicodeEncodeError):
        raise PgQueueError(
            f"key must be text that UTF-8 can encode, or None, not {key!r}"
        ) from None
    return int.from_bytes(digest[:4], "big") % servers


def check_servers(servers: int) -> None:
    """Check a number of servers.

    Raises:
        PgQueueError: it is less than 1.
    """
    if type(servers) is not int or not 1 <= servers < 2**31:
        raise PgQueueError(f"servers must be an int of at least 1, not {servers!r}")
