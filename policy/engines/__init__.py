"""Engines that plan and score with a policy's weights: the ports by which the gate and evaluations ask them."""
