#!/usr/bin/env bash
# vLLM as the conductor, with the flags that Baton's log needs. `deploy/vllm.sh [MODEL] [PORT] [more flags]`, then
#   make serve CONDUCTOR=http://127.0.0.1:8126/v1#conductor
# with BATON_CONDUCTOR_INPUT_USD_PER_MTOK and BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK set (0 for hardware of your own).
# docker-compose.yml runs this file too, so the command line stands here alone.
# VERSIONS=lora (unless set): policy versions are adapters under their own names; BATON_POLICY_ENGINE=vllm-lora.
# VERSIONS=reload: full weights in place of MODEL's (a directory); BATON_POLICY_ENGINE=vllm-reload.
# VERSIONS=none: one version.
# BATON_POLICY_RANK_MAX and BATON_POLICY_VERSIONS_MAX are the gateway's own settings: give both sides the same.
# LORA_TARGETS="q_proj k_proj …": the layers that adapters may have; a Llama on a CPU needs it (docs/swap.md).
# Loopback only (HOST): the routes that load weights ask for no key, so nobody else may reach this port.
set -euo pipefail

versions=()
case "${VERSIONS:-lora}" in
  lora)
    export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    versions=(--enable-lora --max-loras 4 --max-lora-rank "${BATON_POLICY_RANK_MAX:-16}"
      --max-cpu-loras "${BATON_POLICY_VERSIONS_MAX:-16}")
    # shellcheck disable=SC2206 # names of layers, split at spaces
    [ -z "${LORA_TARGETS:-}" ] || versions+=(--lora-target-modules ${LORA_TARGETS})
    ;;
  reload) export VLLM_SERVER_DEV_MODE=1 ;;
  none) ;;
  *)
    echo "vllm.sh: VERSIONS is lora, reload or none, not ${VERSIONS}" >&2
    exit 2
    ;;
esac
export VLLM_NO_USAGE_STATS=1
exec vllm serve "${1:-Qwen/Qwen2.5-7B-Instruct}" \
  --served-model-name conductor \
  --host "${HOST:-127.0.0.1}" --port "${2:-8126}" \
  --logprobs-mode processed_logprobs \
  --generation-config vllm \
  --structured-outputs-config '{"backend":"guidance","disable_any_whitespace":true}' \
  --enable-prefix-caching \
  "${versions[@]}" "${@:3}"
