"""Schema changes of the log, applied in order by `gateway.adapters.postgres.migrate`; each is named for its reason."""
