"""Faults: whole gateways between a client, PostgreSQL, Redis and workers that misbehave, and a checker that compares
what each of them has seen. `make faults` runs the long sizes."""
