"""Other libraries' models over a swap."""
