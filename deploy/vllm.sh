#!/usr/bin/env bash
# vLLM as the conductor, with the flags that Baton's log needs. `deploy/vllm.sh [MODEL] [PORT]`, then
#   make serve CONDUCTOR=http://127.0.0.1:8126/v1#conductor
# with BATON_CONDUCTOR_INPUT_USD_PER_MTOK and BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK set (0 for hardware of your own).
# Loopback only: the routes that load weights ask for no key, so nobody else may reach this port.
set -euo pipefail

export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1
exec vllm serve "${1:-Qwen/Qwen2.5-7B-Instruct}" \
  --served-model-name conductor \
  --host 127.0.0.1 --port "${2:-8126}" \
  --logprobs-mode processed_logprobs \
  --structured-outputs-config '{"backend":"guidance","disable_any_whitespace":true}' \
  --enable-lora --max-lora-rank 16 --max-loras 4 --max-cpu-loras 16 \
  --enable-prefix-caching
