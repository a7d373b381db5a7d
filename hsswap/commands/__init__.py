"""What the command `hsswap` runs: generate and doctor, and the parts they are made of."""
