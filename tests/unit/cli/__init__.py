"""Tests of the command line and the data directory."""
