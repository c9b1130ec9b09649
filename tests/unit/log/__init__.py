"""Tests of the log: records, events and their months."""
