"""The gate: what a candidate version must show before it may serve. It refuses by name, and says what to do."""
