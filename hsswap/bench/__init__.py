"""The command ``hsswap bench``: figures with their machine, date and commit beside them."""
