"""Experience in the process: what requests are planned by is held in memory, and looked up without waiting."""
