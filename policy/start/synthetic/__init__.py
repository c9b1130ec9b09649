"""The warm start: a small conductor learns from supervised plans to read the pool it is shown (docs/conductor.md).

`config` sizes · `shown` fresh pools · `wording` of questions · `label` the plan that a prompt calls for · `samples` and
drills · `tokenizer` · `model` and `sft` (the only files that load torch) · `export` a servable policy directory.
"""

from __future__ import annotations
