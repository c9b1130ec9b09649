"""The trainer: logged or sampled rollouts and their outcomes in, a better conductor out (docs/training.md)."""
