"""The rule learns who answers what: `make demo-routing`. Two workers, a gateway, outcomes, a live table. No torch."""
