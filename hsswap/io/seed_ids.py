"""The seed's calls on block ids, one id each, with typed errors in place of its panics."""

from __future__ import annotations

from hsswap.io.ids import BlockIds


class SeedIds:
    """What a store offers under the seed's names. Arrays of ids go through ``ids``."""

    ids: BlockIds

    def alloc_disk_block_id(self) -> int:
        """A new id with one reference. Raises OutOfBlocks."""
        return int(self.ids.allocate(1)[0])

    def inc_disk_ref(self, block_id: int) -> None:
        """One more holder. Raises StaleBlockId."""
        self.ids.add_reference([block_id])

    def dec_disk_ref(self, block_id: int) -> int:
        """One holder less; how many are left. The last one frees the block, or lets it be kept.

        Raises StaleBlockId for an id that nobody holds.
        """
        return self.ids.drop_one(block_id)

    def disk_refcount(self, block_id: int) -> int:
        """How many hold an id. Raises StaleBlockId when nobody does."""
        return self.ids.refcount(block_id)

    def disk_free_count(self) -> int:
        """Ids that can be given out, kept ones included."""
        return self.ids.free_count
