"""Which blocks of the key-value cache hold which tokens: block tables, free blocks and the prefix cache. Without torch.

A block holds `block_size` tokens. A full block is known by a hash of its tokens and of all tokens before them, chained
from block to block and begun with the tenant's name, so an equal prompt of the same tenant finds the block again and
shares it by reference count. Only full blocks are shared, and at least the last token of a prompt is computed, so
nothing is ever written into a shared block and none has to be copied.

    held by requests (counted) --free--> free, oldest first, still known by its hash --reused--> another hash
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(eq=False)
class HeldBlocks:
    """The blocks of one request, in the order of its tokens: its block table."""

    blocks: array[int]
    num_cached: int  # tokens whose keys and values were there already
    digest: bytes  # hash of the tokens of the first `num_hashed` blocks
    num_hashed: int
    num_shared: int | None = None  # tokens whose blocks may be shared; None: all


class PagedBlocks:
    """Gives requests blocks of `block_size` tokens, which may lie anywhere in the cache. With `prefix_cache`, later
    requests find the blocks of prompts.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._has_prefix_cache = prefix_cache
        self._num_users = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # taken from the front
        self._digests: list[bytes | None] = [None] * num_blocks
        self._known: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(
        self, tokens: Sequence[int], tenant: str, reserve: int = 0, num_shared: int | None = None
    ) -> HeldBlocks | None:
        """Take blocks for `tokens`; None, and nothing is taken, unless `reserve` blocks stay free. Blocks of the first
        `num_shared` tokens alone, or all, may be shared with other requests.
        """
        digest, shared = _first_digest(tenant), list[int]()
        last = len(tokens) - 1 if num_shared is None else min(len(tokens) - 1, num_shared)
        while self._has_prefix_cache and (len(shared) + 1) * self.block_size <= last:
            following = self._hash(digest, tokens, len(shared))
            if following not in self._known:
                break
            digest = following
            shared.append(self._known[digest])
        num_new = self._num_needed(len(tokens)) - len(shared)
        num_revived = sum(not self._num_users[block] for block in shared)
        if self.num_free - num_new - num_revived < reserve:
            return None
        for block in shared:
            self._num_users[block] += 1
            self._free.pop(block, None)
        blocks = array("i", [*shared, *(self._take() for _ in range(num_new))])
        return HeldBlocks(blocks, len(shared) * self.block_size, digest, len(shared), num_shared)

    def append(self, held: HeldBlocks, num_tokens: int) -> bool:
        """Take more blocks until they hold `num_tokens`; False, and nothing is taken, if too few are free."""
        num_new = self._num_needed(num_tokens) - len(held.blocks)
        if num_new > self.num_free:
            return False
        for _ in range(num_new):
            held.blocks.append(self._take())
        return True

    def record(self, held: HeldBlocks, tokens: Sequence[int], num_computed: int) -> None:
        """Say that the keys and values of the first `num_computed` tokens of a request are now in its blocks."""
        if not self._has_prefix_cache:
            return
        last = min(num_computed, len(tokens) if held.num_shared is None else held.num_shared)
        while (held.num_hashed + 1) * self.block_size <= last:
            held.digest = self._hash(held.digest, tokens, held.num_hashed)
            block = held.blocks[held.num_hashed]
            if held.digest not in self._known and self._digests[block] is None:
                self._known[held.digest], self._digests[block] = block, held.digest
            held.num_hashed += 1

    def unshare(self, tokens: Sequence[int], tenant: str) -> None:
        """Make no later request share the blocks of `tokens`, because these may hold NaN."""
        digest = _first_digest(tenant)
        for index in range(len(tokens) // self.block_size):
            digest = self._hash(digest, tokens, index)
            block = self._known.pop(digest, None)
            if block is not None:
                self._digests[block] = None

    def free(self, held: HeldBlocks) -> None:
        """Give a request's blocks back."""
        for block in reversed(held.blocks):  # ends of prompts are reused before their beginnings
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)
        held.blocks = array("i")

    def forget(self) -> None:
        """Make no later request share a block of before, because the model's weights have changed."""
        self._known.clear()
        self._digests = [None] * self.num_blocks

    def _num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None
        self._num_users[block] = 1
        return block

    def _hash(self, digest: bytes, tokens: Sequence[int], index: int) -> bytes:
        """Returns the hash of block number `index`, given that of the tokens before it."""
        own = array("q", tokens[index * self.block_size : (index + 1) * self.block_size])
        return blake2b(digest + own.tobytes(), digest_size=16).digest()


def _first_digest(tenant: str) -> bytes:
    """Returns the hash before the first block of a tenant's prompts."""
    return blake2b(tenant.encode(), digest_size=16).digest()
