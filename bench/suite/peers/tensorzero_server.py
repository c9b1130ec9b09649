"""Start the server that TensorZero's Python package embeds, and write its URL into a file. Runs in its environment.

python tensorzero_server.py CONFIG URL_FILE
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import openai
import tensorzero


def main(config: str, url_file: str) -> None:
    """Serve until SIGTERM."""
    client = openai.OpenAI(api_key="none")
    client = tensorzero.patch_openai_client(client, config_file=config, async_setup=False)
    part = Path(f"{url_file}.part")
    part.write_text(f"{client.base_url}\n", encoding="utf-8")
    part.rename(url_file)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(*sys.argv[1:])
