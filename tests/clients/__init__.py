"""Baton as other people's clients meet it: their SDKs and frameworks, a whole gateway, a scripted model behind it.

`scripts/test-clients` makes the environments these need and runs them; the ordinary test run leaves this folder out.
"""
