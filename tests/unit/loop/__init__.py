"""Tests of the loop: plans, prompts, caps and digests."""
