"""Recipes: the whole learning loop on real parts, each as one resumable command (docs/learning.md, docs/conductor.md).

`learning` and `routing` the demos · `conductor` the conductor in the box · `operator` the commands of `baton` ·
`traffic` applications that ask · `stack` gateways and servers as processes.
"""

from __future__ import annotations
