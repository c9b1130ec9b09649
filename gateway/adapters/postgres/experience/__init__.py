"""Experience in PostgreSQL: how steps are credited, and what the memory of each gateway reads."""
