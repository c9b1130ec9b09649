"""Policies before and after a change of the gateway, on three kinds of work: short answers, code, prose."""
