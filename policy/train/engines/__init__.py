"""Training on engines that others keep: TRL under accelerate, verl on Ray (docs/engines.md).

`policy.train` is the trainer for one device. These take the same logged rows to many.
"""
