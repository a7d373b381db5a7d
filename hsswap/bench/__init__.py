"""``hsswap bench``: figures with machine, date and commit, each beside its baseline of the same run."""
