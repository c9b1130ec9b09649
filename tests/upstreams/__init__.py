"""Local servers that speak the wire formats of model vendors, over real HTTP on loopback."""
