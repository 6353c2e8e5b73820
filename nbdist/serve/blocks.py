"""Cache blocks and who holds them: counted, shared by prefix, salted by version (anywhere).

A block holds the keys and values of `block_size` consecutive tokens of one sequence. A full block
is known by a digest of everything before it and in it, so a prompt that begins like an earlier one
finds its blocks again. It
knows numbers of blocks only, no tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """The blocks of one cache.

    A block is free (nobody refers to it) or held by one or more sequences. A free block keeps its
    content, and is found again by its digest, until it is handed out anew; the one that has been
    free for longest goes first.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens of a block.
        share_prefixes: whether full blocks are found again.
    """

    def __init__(self, num_blocks: int, block_size: int, *, share_prefixes: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks}, block_size={block_size}: a cache needs at least one "
                "block of at least one token"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.version = 0
        self._share = share_prefixes
        self._counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, remembered ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold; a shared one counts once."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks that already hold the start of these tokens, and hold them.

        The last token is never covered: its logits are still to be computed.
        """
        found: list[int] = []
        if not self._share:
            return found
        digest = self._salt()
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            digest = _chain(digest, token_ids[start : start + self.block_size])
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._hold(block)
        return found

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks of unknown content; None, and none handed out, when too few are free."""
        if num_blocks > len(self._free):
            return None
        taken = []
        for _ in range(num_blocks):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._counts[block] = 1
            taken.append(block)
        return taken

    def publish(self, parent: bytes, token_ids: Sequence[int], block: int) -> bytes:
        """Make a full block findable; return its digest, the parent of the next block's.

        Args:
            parent: digest of the block before; empty for the first.
            token_ids: the `block_size` tokens of the block.
            block: holds their keys and values, computed with the present version of the weights.
        """
        digest = _chain(parent or self._salt(), token_ids)
        if self._share and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
        return digest

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks; those that nobody holds any more become free, the last ones first.

        The start of a sequence is the part that others may share: it is kept longest.
        """
        for block in reversed(blocks):
            assert self._counts[block] > 0, f"block {block} was released more often than held"
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)

    def held_once(self, blocks: Sequence[int]) -> list[int]:
        """Return those of these blocks that one sequence alone holds."""
        return [block for block in blocks if self._counts[block] == 1]

    def new_version(self) -> None:
        """The weights have changed: no block of an earlier version is found any more."""
        self.version += 1
        self.forget()

    def forget(self) -> None:
        """Let no block be found any more."""
        self._block_of.clear()
        self._digest_of.clear()

    def _salt(self) -> bytes:
        return b"version %d" % self.version

    def _hold(self, block: int) -> None:
        if self._counts[block] == 0:
            del self._free[block]
        self._counts[block] += 1

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]


def _chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    # 128 bits: two prefixes of one digest are not to be expected in a lifetime
    made = hashlib.blake2b(parent, digest_size=16)
    made.update(array("q", token_ids).tobytes())
    return made.digest()
