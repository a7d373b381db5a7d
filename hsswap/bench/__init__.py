"""``hsswap bench``: the numbers of the design, each beside its baseline from the same run."""
