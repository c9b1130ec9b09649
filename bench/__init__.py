"""The measurements quoted in the docs."""
