"""The block `baton serve` prints once it serves: addresses, keys, and two snippets that work when pasted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.cli.process.datadir import FACTS

QUESTION = "How many grams are there in 51 kilograms? Give the amount as a plain number."


def banner(facts: Mapping[str, Any], data_dir: Path, *, new: bool, took_s: float) -> str:
    """`new`: the keys were made by this start, so the admin key is shown, this once."""
    where = data_dir / FACTS
    admin_key = f"{facts['admin_key']}   (shown once)" if new else f"made at the first start; see {where}"
    return f"""
Baton serves after {took_s:.1f} s. Ctrl-C drains and stops everything it started.

  base URL    {facts["base_url"]}
  data key    {facts["data_key"]}
  admin URL   {facts["admin_url"]}   (a page: what was asked, planned, answered and spent)
  admin key   {admin_key}
  all this    {where}

With curl:

{curl(facts)}

With Python (`pip install openai`):

{python(facts)}
"""


def curl(facts: Mapping[str, Any]) -> str:
    """A shell command that asks one question."""
    body = json.dumps({"model": "baton", "messages": [{"role": "user", "content": QUESTION}]})
    return (
        f"curl -s {facts['base_url']}/chat/completions \\\n"
        f"  -H 'authorization: Bearer {facts['data_key']}' \\\n"
        f"  -H 'content-type: application/json' \\\n"
        f"  -d '{body}'"
    )


def python(facts: Mapping[str, Any]) -> str:
    """The same with OpenAI's own SDK."""
    return f"""from openai import OpenAI

client = OpenAI(base_url="{facts["base_url"]}", api_key="{facts["data_key"]}")
reply = client.chat.completions.create(
    model="baton", messages=[{{"role": "user", "content": "{QUESTION}"}}]
)
print(reply.choices[0].message.content)"""
