"""Engines that serve conductors: their plans, their log-probs and the swap of versions."""
