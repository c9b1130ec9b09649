"""Tests: unit (pure), contract (fake and real), integration (real parts on loopback), migration, acceptance."""
