"""Tests of keys, limits and who may do what."""
