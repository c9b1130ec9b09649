"""Routing on recorded answers of real models."""
