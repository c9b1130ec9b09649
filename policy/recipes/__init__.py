"""Recipes: the whole learning loop on real parts, each as one resumable command (docs/learning.md, docs/conductor.md).

`learning` the demo · `conductor` the conductor in the box · `operator` the commands of `baton` that both give ·
`traffic` applications that ask · `stack` gateways and servers as processes · `picture` the demo's figure.
"""

from __future__ import annotations
