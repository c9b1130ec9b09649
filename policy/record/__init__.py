"""Recording: questions are put to the workers of a pool under a dollar cap; their answers become a replay file.

`journal` is the append-only file that money and answers go to first; `recorder` makes the calls; `replayfile` writes
what the replay workers read.
"""
