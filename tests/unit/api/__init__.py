"""Tests of the edge of the API: bodies and pressure."""
