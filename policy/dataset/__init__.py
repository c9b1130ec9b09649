"""The log as training data: what is selected, what is left out and why, and the files other trainers read.

`select` says which planning calls are wanted, `read` streams them from PostgreSQL, `rules` decide what may be trained
on, `curate` puts the three together for a job (`load`) or a file (`export`).
"""

from __future__ import annotations
