"""Recorded exchanges of vendors, sent again through a gateway whose workers answer with the recorded bytes."""
