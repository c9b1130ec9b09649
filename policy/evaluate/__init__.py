"""Evaluation: any policies on any environment's held-out questions, with the statistics that tell luck from skill."""
