"""The two words for "nothing here", and how traced code reports failure."""

import enum

NULL_BLOCK = 0
"""Block 0 of every pool: never handed out; in a table it says that no block stands there."""

MISS = -1
"""Nothing, among rows, slots and indices."""


class Status(enum.IntEnum):
    """What a transition did. Anything but `OK` left its state unchanged where its docstring says so."""

    OK = 0
    OUT_OF_BLOCKS = 1
    OUT_OF_HOST_BLOCKS = 2
    DOUBLE_FREE = 3
    REFUSED = 4
    BAD_BLOCK = 5
    HOMELESS = 6
    OUT_OF_PARKING = 7
    OUT_OF_MEMORY = 8


_MESSAGES = {
    Status.OUT_OF_BLOCKS: "the GPU pool has too few free blocks; raise gpu_pool_bytes, or run fewer or shorter requests.",
    Status.OUT_OF_HOST_BLOCKS: "the host pool has too few free blocks; raise host_pool_bytes, or run fewer or shorter requests.",
    Status.DOUBLE_FREE: "a block was freed more often than it was referenced; the pool is unchanged.",
    Status.HOMELESS: "selected entries were found in no tier; the logits cannot be trusted.",
    Status.REFUSED: "the transition was refused; the state is unchanged.",
    Status.OUT_OF_PARKING: "the parking has no free place or too few free pages; raise parked_requests or parked_pages.",
    Status.OUT_OF_MEMORY: "an image's pages found no memory on their way; the state is unchanged. Free device or host memory.",
    Status.BAD_BLOCK: "a block id lies outside its pool; the pool is unchanged.",
}


class TierError(RuntimeError):
    """A transition failed; raised by the owner of a jitted loop from a `Status`."""


def raise_for_status(status: int, where: str) -> None:
    """Raises `TierError` with the status's message; returns where it is `OK`."""
    code = Status(int(status))
    if code is not Status.OK:
        raise TierError(f"{where}: {code.name}: {_MESSAGES[code]}")
