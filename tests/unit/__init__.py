"""Tests of pure code, a folder for each room."""
