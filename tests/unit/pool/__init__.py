"""Tests of the pool file and its changes."""
