"""``hsswap bench``: figures with machine, date and commit, beside baselines of the same run."""
