"""One file per change: number, then reason."""
