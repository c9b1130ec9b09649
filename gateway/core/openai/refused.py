"""Properties that no client may send, at any depth: they could redirect a call, unlock a key, or fake a reply. Pure.

The names are what proxies and client libraries take as settings beside the body. Baton hands none of them on; refusing
them says so to whoever tries, instead of leaving them to believe it worked.
"""

from __future__ import annotations

import re

REFUSED = frozenset(
    {
        "additional_drop_params", "allowed_openai_params", "api_base", "api_key", "api_keys", "api_secret", "api_type",
        "api_version", "authorization", "azure_endpoint", "base_model", "base_url", "callbacks", "client",
        "content_policy_fallbacks", "context_window_fallback_dict", "context_window_fallbacks", "credentials",
        "custom_llm_provider", "default_fallbacks", "default_headers", "default_query", "deployment_id",
        "drop_params", "endpoint_url", "extra_body", "extra_headers", "extra_query", "failure_callback", "fallbacks",
        "headers", "hf_model_name", "http_client", "input_cost_per_second", "input_cost_per_token", "litellm_params",
        "max_retries", "mock_response", "mock_timeout", "mock_tool_calls", "model_info", "model_list", "num_retries",
        "organization", "output_cost_per_second", "output_cost_per_token", "project", "proxies", "proxy",
        "proxy_server_request", "request_timeout", "retry_policy", "retry_strategy", "secret_fields", "shared_session",
        "ssl_verify", "stream_timeout", "success_callback", "timeout", "use_litellm_proxy", "user_config",
    }
)  # fmt: skip
REFUSED_PREFIXES = (
    "aws_",
    "azure_",
    "bedrock_",
    "gcp_",
    "litellm_",
    "mock_",
    "oci_",
    "sagemaker_",
    "vertex_",
    "watsonx_",
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def is_refused(name: str) -> bool:
    """Whether a property of that name is refused: however it is cased, in `camelCase`, with `-` for `_`, or padded."""
    return any(_listed(spelt) for spelt in (_plain(name), _plain(_HUMP.sub("_", name))))


def _plain(name: str) -> str:
    return re.sub(r"[\s.\-]+", "_", name.strip().lower()).strip("_")


def _listed(name: str) -> bool:
    return name in REFUSED or name.startswith(REFUSED_PREFIXES)
