"""What a developer or CI calls: install, check, test, serve, and the generators of reference pages."""
