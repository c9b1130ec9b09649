"""Tests of OpenAI's bodies: gateway/core/openai."""
